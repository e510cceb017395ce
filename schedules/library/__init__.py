"""The schedules that come with the package; importing it registers them."""

from schedules.library import forward_only, gpipe, interleaved_1f1b, one_f_one_b

__all__ = ["forward_only", "gpipe", "interleaved_1f1b", "one_f_one_b"]
