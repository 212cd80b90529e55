"""Races are seen: two streams, or a stream and the host, that use one piece of memory without waiting for each other.

Numbers here are computed at once, one after the other, so a program that forgets to wait gets right ones; on a GPU it would not, or
not always. `detector` knows who has waited for whom and who used what, compares them, and raises; `hooks` report to it, and turn all on and
off. Nothing of it runs while it is off.
"""

from virtualgpu.sanitizer.detector import UnsynchronizedAccessError

__all__ = ["UnsynchronizedAccessError"]
