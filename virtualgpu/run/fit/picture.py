"""The picture of what `fit` tried: memory beside the card's, and speed. Drawn with matplotlib on axes that are given."""

from collections.abc import Sequence

from virtualgpu.run.fit.search import Trial


def draw(memory, speed, trials: Sequence[Trial], colors: Sequence[str]) -> None:
    """A row a trial, a color a card, the last one for what went wrong. `memory`: the peak, with a line where the card ends, pale where it is
    not enough. `speed`: samples (where all are known, else steps) per simulated second, or what went wrong."""
    counted = all(trial.samples for trial in trials if trial.fits and trial.step)
    cards = list(dict.fromkeys(trial.card for trial in trials))
    for row, trial in enumerate(trials):
        color = colors[cards.index(trial.card) % (len(colors) - 1)]
        peak, capacity = (trial.reserved or 0) / 2**30, trial.capacity / 2**30
        memory.barh(row, peak, 0.7, color=color, alpha=1 if trial.fits else 0.3)
        memory.plot([capacity] * 2, [row - 0.5, row + 0.5], color="#333333", linewidth=2)
        if not trial.fits:
            style = {"textcoords": "offset points", "va": "center", "color": colors[-1], "weight": "bold"}
            speed.annotate(trial.status, (0, row), (5, 0), **style)
        elif trial.step:
            drawn = speed.barh(row, (trial.samples or 0 if counted else 1) / trial.step, 0.7, color=color)
            speed.bar_label(drawn, fmt=lambda value: f"{value:,.3g}" if value < 1000 else f"{value:,.0f}", padding=3)
    memory.set(xlabel="peak reserved, GiB (line: the card's end)", ylim=(len(trials) - 0.5, -0.5))
    memory.set_yticks(range(len(trials)), [_name(trial) for trial in trials])
    speed.set(xlabel="samples per second, all GPUs" if counted else "optimizer steps per second")
    speed.margins(x=0.18)
    speed.locator_params(axis="x", nbins=4)  # numbers of five digits are wide
    speed.xaxis.set_major_formatter("{x:,g}")
    for axes in (memory, speed):
        axes.grid(axis="y", visible=False)
        axes.tick_params(left=False)


def _name(trial: Trial) -> str:
    number = f"{trial.gpus} x " if trial.gpus > 1 else ""
    return ", ".join([f"{number}{trial.card}", *(f"{name} {value}" for name, value in trial.values.items())])
