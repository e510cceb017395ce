"""The schedules that come with the package; importing it registers them."""

from schedules.library import (
    auto,
    breadth_first,
    chimera,
    dualpipe,
    eager_1f1b,
    forward_only,
    gpipe,
    hanayo,
    interleaved_1f1b,
    interleaved_zb,
    one_f_one_b,
    v_blocks,
    zb_h,
    zb_v,
)

__all__ = [
    "auto",
    "breadth_first",
    "chimera",
    "dualpipe",
    "eager_1f1b",
    "forward_only",
    "gpipe",
    "hanayo",
    "interleaved_1f1b",
    "interleaved_zb",
    "one_f_one_b",
    "v_blocks",
    "zb_h",
    "zb_v",
]
