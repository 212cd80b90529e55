"""Where lessons compare memory, they compare the fullest GPU: what fits is decided there."""

from types import SimpleNamespace

import pytest
import series

import virtualgpu


def cells(number: str) -> list[str]:
    (path,) = (path for path in series.notebooks() if path.name.startswith(number))
    return [cell.source for cell in series.code_cells(series.read(path))]


def source(number: str, words: str) -> str:
    """The one cell of code that holds these words."""
    (found,) = (cell for cell in cells(number) if words in cell)
    return found


@pytest.mark.parametrize("fullest", range(4))
def test_the_schedules_memory_that_is_drawn_is_the_maximum_over_the_ranks(fullest):
    """In the V of zero bubble it is the last rank, and what was drawn was once the first one's."""
    names, counts = ("GPipe", "1F1B", "interleaved", "zero bubble"), (4, 8, 16)
    peaks = {
        (name, n): [2**30 * (i + n) * (2 if rank == fullest else 1) for rank in range(4)]
        for i, name in enumerate(names, 1)
        for n in counts
    }
    drawn = {}
    lesson = {
        "GiB": 2**30,
        "SCHEDULES": dict.fromkeys(names),
        "counts": counts,
        "four": {job: SimpleNamespace(peaks=ranks) for job, ranks in peaks.items()},
        "runs": {4: {job: (None, ranks) for job, ranks in peaks.items()}},
        "print": lambda *words: None,
        "plots": SimpleNamespace(sweep=lambda x, lines, title, **options: drawn.update(lines, title=title, **options)),
    }
    lessons = cells("11")
    start = next(at for at, cell in enumerate(lessons) if "held = {" in cell)
    for cell in lessons[start:]:
        exec(cell, lesson)
        if "plots.sweep(" in cell:
            break
    for name in names:
        assert drawn[name] == [max(peaks[name, n]) / 2**30 for n in counts]
    assert "fullest GPU" in drawn["title"] and "fullest GPU" in drawn["ylabel"]


@pytest.fixture
def of_03(monkeypatch):
    """What notebook 03 measures with, without the cells between."""
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    lesson: dict = {}
    exec(source("03", "def recorded").split("def recorded")[0], lesson)  # its imports
    for words in ("def resnet_row", "def measure("):
        exec(source("03", words).split("one_gpu, ")[0], lesson)
    yield lesson
    virtualgpu.reset()


@pytest.mark.parametrize("cut, fuller", [(4, 1), (17, 0)])
def test_a_pipelines_memory_is_its_fuller_gpus(of_03, cut, fuller):
    torch, two_stages = of_03["torch"], of_03["TwoStages"]
    _, mib, timeline = of_03["measure"](lambda: two_stages(cut, 60))
    with of_03["virtualgpu"].dry_run(2, like="T4"):
        model = two_stages(cut, 60)
        of_03["train_step"](model, torch.optim.SGD(model.parameters(), lr=0.01))
        seen = [torch.cuda.max_memory_allocated(i) / 2**20 for i in range(2)]
    assert seen[fuller] > 2 * seen[1 - fuller]
    assert mib == pytest.approx(max(seen), rel=0.01)
    assert len(timeline.rows) == 2
