"""`python -m virtualgpu --explain`, its options read."""

import sys
from typing import TYPE_CHECKING

from virtualgpu.environment import Settings
from virtualgpu.run.explain import real, runs, table
from virtualgpu.run.trials import progress
from virtualgpu.run.trials.programs import ended_by_sigterm

if TYPE_CHECKING:
    from virtualgpu.run.cli import Options


def main(options: "Options", settings: Settings) -> int:
    """Run the program and print. The status is 0 where there is something to tell, 2 where the program failed; 130 at an interrupt,
    of which, as of SIGTERM, no program is left.

    settings: the virtual GPUs. Where nobody asked for them (options.real), this machine's own are taken, if it has some.

    Raises ValueError for a program that is not there.
    """
    most = runs.STEPS if options.steps is None else options.steps
    try:
        with ended_by_sigterm(), progress.line() as told:
            if options.real and real.gpus():
                where, found = table.REAL, real.run(options.program, most, options.limit, told)
            else:
                where = table.machine(settings)
                found = runs.run(options.program, settings, most, options.jobs, options.limit, told)
    except KeyboardInterrupt:
        print("\nInterrupted: no program is left.", file=sys.stderr)
        return 130
    if found.failed and not options.json:
        print(f"python -m virtualgpu: {found.failed}", file=sys.stderr)
    else:
        print(table.as_json(found) if options.json else "\n".join(table.lines(found, where)))
    return 2 if found.failed else 0
