"""`python -m virtualgpu --explain`, its options read."""

import sys
from typing import TYPE_CHECKING

from virtualgpu.environment import Settings
from virtualgpu.run import explain, explain_real, explain_table

if TYPE_CHECKING:
    from virtualgpu.run.cli import Options


def main(options: "Options", settings: Settings) -> int:
    """Run the program and print. The status is 0 where there is something to tell, 2 where the program failed; 130 at an interrupt.

    settings: the virtual GPUs. Where nobody asked for them (options.real), this machine's own are taken, if it has some.

    Raises ValueError for a program that is not there.
    """
    bar, most = _Bar(), explain.STEPS if options.steps is None else options.steps
    try:
        if options.real and explain_real.gpus():
            where, found = explain_table.REAL, explain_real.run(options.program, most, options.limit, bar.told)
        else:
            where = explain_table.machine(settings)
            found = explain.run(options.program, settings, most, options.jobs, options.limit, bar.told)
    except KeyboardInterrupt:
        bar.end()
        print("\nInterrupted: no program is left.", file=sys.stderr)
        return 130
    bar.end()
    if found.failed and not options.json:
        print(f"python -m virtualgpu: {found.failed}", file=sys.stderr)
    else:
        print(explain_table.as_json(found) if options.json else "\n".join(explain_table.lines(found, where)))
    return 2 if found.failed else 0


class _Bar:
    """One line on a terminal: how far it is."""

    def __init__(self):
        self.shown = sys.stderr is not None and sys.stderr.isatty()

    def told(self, words: str) -> None:
        if self.shown:
            print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        self.told("")
