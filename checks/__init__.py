"""Graders of the exercises. Each runs the reader's code and says in a line what it found: numbers where there are numbers, and where to
look next. An answer that is right in another way than the solution passes.

| it prints | it returns | under CHECKS=strict |
|---|---|---|
| `[passed] well done` | True | the same |
| `[not yet] ...` | False | raises `NotYet`, an AssertionError whose message is the complaint |
| `[skipped] ...`: it cannot run on this machine (Windows has no fork) | None: neither | raises `Skipped`, a `NotYet` that pytest and unittest count as skipped |

Without CHECKS=strict in the environment, which is for who grades a class, a grader raises nothing but KeyboardInterrupt: *Run all* reaches
the end with the exercises still open.
"""

from checks.grader import NotYet, Skipped
from checks.notebook_01 import frozen, resumes, survives
from checks.notebook_02 import skip_repaired, split_in_two
from checks.notebook_03 import keeps_both_busy, schedules
from checks.notebook_04 import averages, talks_early
from checks.notebook_05 import frugal, goes_on
from checks.notebook_06 import estimates, leaks_nothing
from checks.notebook_07 import accumulates, trains_a_billion
from checks.notebook_08 import names_the_culprit, weighs_tokens_alike
from checks.notebook_09 import ends_the_same, leaves_together
from checks.notebook_10 import shards_adam, tensor_plan
from checks.notebook_11 import runs_in_order, runs_large
from checks.notebook_12 import finds_layouts, plans_a_week

__all__ = [
    "NotYet",
    "Skipped",
    "accumulates",
    "averages",
    "ends_the_same",
    "estimates",
    "finds_layouts",
    "frozen",
    "frugal",
    "goes_on",
    "keeps_both_busy",
    "leaks_nothing",
    "leaves_together",
    "names_the_culprit",
    "plans_a_week",
    "resumes",
    "runs_in_order",
    "runs_large",
    "schedules",
    "shards_adam",
    "skip_repaired",
    "split_in_two",
    "survives",
    "talks_early",
    "tensor_plan",
    "trains_a_billion",
    "weighs_tokens_alike",
]
