"""Where lessons compare memory, they compare the fullest GPU: what fits is decided there."""

import re
from types import SimpleNamespace

import pytest

from notebooks.figures import lesson_11
from tests.notebooks import answers


def source(number: str, words: str) -> str:
    """The one cell of code that holds these words."""
    (found,) = (cell for cell in answers.cells(number) if words in cell)
    return found


def test_the_schedules_memory_that_is_drawn_is_the_maximum_over_the_ranks(monkeypatch):
    """In the V of zero bubble it is the last rank, and what was drawn was once the first one's."""
    gib, shown = 2**30, []
    runs = {
        name: SimpleNamespace(seconds=1.0, idle=30.0, peaks=[i * gib, i * gib, i * gib, 2 * i * gib])
        for i, name in enumerate(("GPipe", "1F1B", "ZBV"), 1)
    }
    monkeypatch.setattr(lesson_11.figures, "show", lambda figure, *words: shown.append(figure))
    lesson_11.time_and_memory(runs, "title", seconds=1.0, peak=6 * gib)
    memory = shown[0].axes[1]
    assert [bar.get_width() for bar in memory.patches] == [2, 4, 6] and "fullest" in memory.get_xlabel()
    assert [text.get_text() for text in memory.texts] == ["2.00", "4.00", "6.00"]
    assert all(re.search(r"max\(\w+\.peaks\)", source("11", words)) for words in ("def uneven_step", "def row("))


@pytest.mark.parametrize("cut, fuller", [(4, 1), (17, 0)])
def test_a_pipelines_memory_is_its_fuller_gpus(cut, fuller):
    """What notebook 03 measures with, without the cells between."""
    of_03 = answers.defined("03", "torch", "virtualgpu", "TwoStages", "measure", "train_step")
    torch, two_stages = of_03["torch"], of_03["TwoStages"]
    _, mib, _ = of_03["measure"](lambda: two_stages(cut, 60))
    with of_03["virtualgpu"].dry_run(2, like="T4"):
        model = two_stages(cut, 60)
        of_03["train_step"](model, torch.optim.SGD(model.parameters(), lr=0.01))
        seen = [torch.cuda.max_memory_allocated(i) / 2**20 for i in range(2)]
    assert seen[fuller] > 2 * seen[1 - fuller] and mib == pytest.approx(max(seen), rel=0.01)
