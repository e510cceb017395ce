"""The schedules that come with the package; importing it registers them, in the order of a reader's interest."""

from schedules.library import forward_only, gpipe, interleaved_1f1b, one_f_one_b

__all__ = ["forward_only", "gpipe", "interleaved_1f1b", "one_f_one_b"]
