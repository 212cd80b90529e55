"""The quick programs of `make accuracy` meet their targets, and the table says what it should."""

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest
import torchvision

import virtualgpu
from tests.accuracy import __main__ as command
from tests.accuracy import language, one_card, parallel, programs, table, vision
from tests.accuracy.published import PROGRAMS, TITLES, Row, published, ratio
from tests.accuracy.runner import in_unit
from virtualgpu.hardware.machine import HOSTS
from virtualgpu.hardware.specs import SPECS

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def virtual(monkeypatch):
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    virtualgpu.reset()
    yield
    virtualgpu.reset()


def test_the_zero_recipe():
    found = parallel.zero_recipe()
    assert len(found) == 5 and [row.what for row in found if not row.met] == []


def test_bert_large_checkpointed():
    row = published("bert_large")[4]
    assert (row.kind, row.batch, row.options) == ("memory", 1, {"accumulated": "4", "checkpointing": "yes"})
    assert in_unit(row, language.train_bert(row)) == pytest.approx(row.figure - language.KERNELS, rel=0.03)


@pytest.mark.parametrize(
    "kind, published, simulated, tolerance, told, met",
    [
        ("memory", 80.0, 82.0, 1, "+2.5 %", False),
        ("ratio", 1.07, 1.04, 10, "-3.0 points", True),
        ("speed", 500, 1000, None, "time x 2.00", None),  # the real program took twice as long
        ("time", 100, 50, None, "time x 2.00", None),
        ("fits", 1, 1, None, "alike", True),
        ("fits", 0, 1, None, "otherwise", False),
        ("count", 12, 12, 0, "+0", True),
        ("count", 12, 20, 0, "+8", False),
    ],
)
def test_differences(kind, published, simulated, tolerance, told, met):
    row = Row("a", kind, "", published, simulated, tolerance)
    assert (row.told(), row.met) == (told, met)


def test_every_program_is_there_and_has_its_settings_and_its_source():
    for name, about in PROGRAMS.items():
        assert callable(getattr(importlib.import_module(f"tests.accuracy.{about['module']}"), name))
        assert "ettings" in about["settings"]
        assert about["url"].startswith("https://") or about["url"] == "measured here"


def test_the_published_file_is_well_formed():
    rows = published()
    assert len(rows) == len(set(rows)) and {row.program for row in rows} <= set(PROGRAMS)
    precisions = ("float32", "ieee", "tf32", "half", "bfloat16", "AMP", "AMP bfloat16")
    for row in rows:
        assert row.card in SPECS and row.kind in ("time", "speed", "kernels", "memory", "fits", "ratio", "count"), row
        assert row.mode in ("train", "infer") and row.precision in precisions, row
        assert row.layout in ("first", "last", "") and row.what in TITLES, row
        assert row.source.startswith("https://") or row.source == "measured here", row
        assert row.batch > 0 and row.gpus > 0 and (row.figure > 0 or row.kind == "fits"), row
        era = "2026" if row.source == "measured here" else max("2021", min("2024", row.date[:4]))
        assert row.host in ("", "2023" if era == "2022" else era) and row.host in (*HOSTS, ""), row
        assert row.licence and all("=" in part for part in row.settings.split("; ") if part)
        assert not row.missed or len(row.missed) < 150, row


def test_our_programs_are_all_there_and_their_titles_count_them():
    rows = published("one_card")
    assert {row.model for row in rows} >= set(programs.PROGRAMS)
    assert all(row.model in programs.PROGRAMS or hasattr(torchvision.models, row.model) for row in rows)
    assert len({(one_card.name(row), row.size, row.kind) for row in rows}) == len(rows)
    for group in ("one_card", "unseen"):
        counts = Counter(row.card for row in rows if (row.what, row.kind) == (group, "time"))
        title = f"{counts['H100']} programs on an H100, {counts['H200']} of them on an H200"
        assert TITLES[group].startswith(title) and len(counts) == 2


def test_what_is_measured_twice_is_run_once():
    wanted = ("bert_base", 128, "float32")
    rows = [row for row in published("transformer") if (row.model, row.batch, row.precision) == wanted]
    assert [row.kind for row in rows] == ["speed", "memory"] and rows[0].run == rows[1].run
    assert rows[0].run != rows[0]._replace(settings="").run and rows[1].options["figure"] == "nvidia-smi"


def test_memory_between_two_batches():
    before, after = (Row(what, "memory", "MiB", size, size - 500, url="u") for what, size in (("a", 2500), ("b", 4500)))
    row = language.between(before, after)
    assert (row.what, row.published, row.simulated, row.url) == ("b, more than the batch before", 2000, 2000, "u")


def test_pairs_differ_in_one_thing():
    def row(**changed):
        return published("vision")[0]._replace(model="m", precision="float32", layout="first", card="A", **changed)

    changes = {}, {"precision": "half"}, {"layout": "last"}, {"card": "B", "date": "later"}
    rows = [row()._replace(**changed) for changed in changes]
    assert [(at, other) for _, at, other in vision.pairs(rows)] == [(1, 0), (2, 0), (3, 0)]


def test_by_kind():
    rows = [
        Row("a", "memory", "GiB", 80, 82),
        Row("b", "time", "s", 130, 100),
        Row("c", "speed", "/s", 100, 110),
        Row("d", "speed", "/s", 100, 200, gpus=8),
        Row("e", "ratio", "", 1.0, 1.0),
        Row("f", "fits", "", 1, 1),
        Row("g", "fits", "", 0, 1),
        Row("h", "memory", "GiB", 80, 10, note="in no statistic"),
    ]
    told = table.by_kind(rows).splitlines()[2:]
    assert told[0].startswith("| memory | 1 | 100 % | 100 % | 100 % | 100 % | 100 % | 0.98 |")
    times = "| time, one GPU | 2 | 0 % | 50 % | 50 % | 100 % | 100 % | 1.20 | b: 130.00 s, simulated 100.00 s (x 1.30)"
    assert told[1].startswith(times)
    assert told[2].startswith("| time, several GPUs | 1 | 0 % | 0 % | 0 % | 0 % | 0 % | 2.00 |")
    assert told[3].startswith("| ratios | 1 | 100 % |")
    assert table.confusion(rows).splitlines()[2:] == [
        "| measured: fits | 1 | 0 |",
        "| measured: out of memory | 1 | 0 |",
    ]
    assert "**Does this batch fit?** 1 of 2" in table.in_words(rows)
    assert table.confusion(rows[:5]) == ""


def test_a_row_that_is_missed_says_why():
    near, far = (Row(what, "time", "s", s, 100, missed="supposed: dust") for what, s in (("a", 120), ("b", 140)))
    assert table.reason(near) == "" and table.reason(far) == "supposed: dust"
    assert table.by_kind([near, far]).endswith("| b: 140.00 s, simulated 100.00 s (x 1.40; supposed: dust) |")
    assert [line.endswith("  supposed: dust") for line in table.plain([near, far]).splitlines()[2:4]] == [False, True]
    assert ratio("c", near, far).missed == "supposed: dust"
    batch = Row("d", "fits", "", 0, 1, missed="supposed: dust")
    assert table.reason(batch) == "supposed: dust"


def test_a_source_with_many_rows_counts_once():
    rows = [Row("a", "time", "s", 100, 100, group="many")] * 9 + [Row("b", "time", "s", 200, 100, group="one")]
    assert table.alike(rows) == "50 %"
    assert "| time, one GPU | 10 | 90 % | 90 % | 90 % | 90 % | 50 % |" in table.by_kind(rows)


def test_a_batch_that_fits_and_one_that_does_not():
    rows = [row for row in published("fits") if row.model == "vit_b_16" and row.layout == "first"]
    assert [vision.is_trained(row) for row in rows] == [bool(row.figure) for row in rows] == [True, False]


def test_tables_are_written_between_their_marks(tmp_path):
    rows = [Row("a", "memory", "GiB", 80.0, 82.0, 1, group="gpt2", url="https://x.org")]
    rows.append(Row("b", "speed", "/s", 56, 100, group="gpt2"))
    (tmp_path / "virtualgpu/docs").mkdir(parents=True)
    for name in ("README.md", "virtualgpu/docs/accuracy.md"):
        if (ROOT / name).exists():  # the front page is the course's
            assert (ROOT / name).read_text(encoding="utf-8").count(table.BEGIN) == 1
        (tmp_path / name).write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n", encoding="utf-8")
    table.write(rows, tmp_path)
    text = (tmp_path / "virtualgpu/docs/accuracy.md").read_text(encoding="utf-8")
    assert "](https://x.org) | memory | 1 | 100 % | 100 % | 100 % | 100 % | 0.98 | a: 80.00 GiB, simulated 82" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "\nold\n" not in text
    front = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "**Memory**: 100 % within 5 % (of 1 figures)." in front and "|" not in front, "in words"
    (tmp_path / "README.md").write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match=r"README.md has no place"):
        table.write(rows, tmp_path)


def test_the_tables_are_not_written_from_some_programs_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "BUILD", tmp_path)
    monkeypatch.setattr("sys.argv", ["accuracy", "one_card", "--write"])
    with pytest.raises(SystemExit):
        command.main()
    assert "--write needs the rows of all: there are none yet of bert_large, data_p" in capsys.readouterr().err


@pytest.mark.skipif(not (ROOT / "data").exists(), reason="a table of the course")
def test_each_published_figure_of_sharded_models_is_among_those_that_lesson_10_shows():
    stored = json.loads((ROOT / "data/published.json").read_text("utf-8"))
    kept = {(row["source"], row["published"]) for row in stored}
    for row in published():
        if row.program.startswith("torchtitan_") or row.program in ("lora", "megatron", "zero_recipe", "llama_eager"):
            assert (row.program, row.figure) in kept, row
