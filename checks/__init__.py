"""Graders of the exercises. Each runs the reader's code and says what it found: numbers where there are numbers, and where to
look next. A grader never raises, so that *Run all* reaches the end with the exercises still open.
"""

from checks.notebook_01 import frozen, resumes, survives
from checks.notebook_02 import skip_repaired, split_in_two
from checks.notebook_03 import fastest_plan, slots
from checks.notebook_04 import averages, talks_early
from checks.notebook_05 import frugal, goes_on, tunes
from checks.notebook_06 import causes, culprits, riddle, stranger
from checks.notebook_07 import slims, within_budget
from checks.notebook_08 import stays_together, trains_on_all
from checks.notebook_09 import fits_two_t4s, shards_below, tensor_plan
from checks.notebook_10 import exchanged, one_f_one_b

__all__ = [
    "averages",
    "causes",
    "culprits",
    "exchanged",
    "fastest_plan",
    "fits_two_t4s",
    "frozen",
    "frugal",
    "goes_on",
    "one_f_one_b",
    "resumes",
    "riddle",
    "shards_below",
    "skip_repaired",
    "slims",
    "slots",
    "split_in_two",
    "stays_together",
    "stranger",
    "survives",
    "talks_early",
    "tensor_plan",
    "trains_on_all",
    "tunes",
    "within_budget",
]
