"""Graders of the exercises. Each runs the reader's code and says what it found: numbers where there are numbers, and where to
look next. A grader never raises, so that *Run all* reaches the end with the exercises still open.
"""

from checks.notebook_01 import frozen, loads_what_fits, resumes
from checks.notebook_02 import fastest_that_fits, most_even, skip_repaired
from checks.notebook_03 import slots
from checks.notebook_04 import averages, talks_early
from checks.notebook_05 import frugal, goes_on, search_space
from checks.notebook_06 import causes, culprits, riddle, stranger
from checks.notebook_07 import slims, within_budget
from checks.notebook_08 import shards, stays_together
from checks.notebook_09 import fewest_words, shards_below, tensor_plan
from checks.notebook_10 import exchanged, micro_batches

__all__ = [
    "averages",
    "causes",
    "culprits",
    "exchanged",
    "fastest_that_fits",
    "fewest_words",
    "frozen",
    "frugal",
    "goes_on",
    "loads_what_fits",
    "micro_batches",
    "most_even",
    "resumes",
    "riddle",
    "search_space",
    "shards",
    "shards_below",
    "skip_repaired",
    "slims",
    "slots",
    "stays_together",
    "stranger",
    "talks_early",
    "tensor_plan",
    "within_budget",
]
