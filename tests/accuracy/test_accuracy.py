"""The quick programs of `make accuracy` meet their targets, and the table says what it should."""

import importlib
from pathlib import Path

import pytest

import virtualgpu
from tests.accuracy import table
from tests.accuracy.__main__ import PROGRAMS
from tests.accuracy.row import Row

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def virtual(monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    virtualgpu.reset()
    yield
    virtualgpu.reset()


def test_the_zero_recipe():
    from tests.accuracy import zero_recipe

    found = zero_recipe.rows()
    assert len(found) == 5 and [row.what for row in found if not row.met] == []


def test_bert_large_checkpointed():
    from tests.accuracy import bert_large

    settings = (1, 4, True, False)
    published, _ = bert_large.PUBLISHED[settings]
    reserved, _ = bert_large.train(*settings)
    assert reserved == pytest.approx(published - bert_large.KERNELS, rel=0.03)


def test_differences():
    memory = Row("a", "memory", "GiB", 80.0, 82.0, 1)
    assert memory.told() == "+2.5 %" and memory.met is False
    ratio = Row("b", "ratio", "", 1.07, 1.04, 10)
    assert ratio.told() == "-3.0 points" and ratio.met
    assert Row("c", "speed", "tokens/s", 560, 1000).told() == "x 0.56"
    assert Row("d", "time", "s", 100, 56).told() == "x 0.56" and Row("d", "time", "s", 100, 56).met is None
    assert Row("e", "count", "", 12, 12, 0).met and not Row("e", "count", "", 12, 20, 0).met
    assert Row("f", "cost", "s", 20, 21).told() == "above"


def test_every_program_says_its_settings_and_its_source():
    for name in PROGRAMS:
        program = importlib.import_module(f"tests.accuracy.{name}")
        assert "ettings" in program.__doc__ or program.URL == "measured here"
        assert program.URL.startswith("https://") or program.URL == "measured here"


def test_tables_are_written_between_their_marks(tmp_path):
    rows = [
        Row("a", "memory", "GiB", 80.0, 82.0, 1, source="gpt2", url="https://x.org"),
        Row("b", "speed", "/s", 56, 100, source="gpt2"),
    ]
    (tmp_path / "virtualgpu").mkdir()
    for name in ("README.md", "virtualgpu/README.md"):
        assert (ROOT / name).read_text(encoding="utf-8").count(table.BEGIN) == 1
        (tmp_path / name).write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n", encoding="utf-8")
    table.write(rows, tmp_path)
    text = (tmp_path / "virtualgpu/README.md").read_text(encoding="utf-8")
    assert "| a ([source](https://x.org)) | 80.00 GiB | 82.00 GiB | +2.5 % (missed) |" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "\nold\n" not in text
    assert "| +2.5 % |  | 0.56 to 0.56 |" in (tmp_path / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match=r"README.md has no place"):
        table.write(rows, tmp_path)
