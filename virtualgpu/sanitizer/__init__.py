"""Races are seen: two streams, or a stream and the host, that use one piece of memory without waiting for each other.

Numbers here are computed at once, one after the other, so a program that forgets to wait gets right ones; on a GPU it would not, or
not always. `order` knows who has waited for whom, `accesses` who used what, `freed` who gave it back, `detector` compares them and raises; `waits`,
`operations` and `collectives` report to it, `frames` says from which line, `report` words it, and `switch` turns all on and off. Nothing of it runs while it is off.
"""

from virtualgpu.sanitizer.report import UnsynchronizedAccessError

__all__ = ["UnsynchronizedAccessError"]
