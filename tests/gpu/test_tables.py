"""The clock's tables: what the script writes of the files of measurements, and another card's."""

import csv
import json
import math
import re
from statistics import median

import pytest
import torch

from tests.accuracy import convolutions as published
from tests.accuracy.kernels import within
from tests.gpu import kernels_of_a_card, tables
from virtualgpu.hardware.specs import SPECS
from virtualgpu.timing import kernels
from virtualgpu.timing.convolutions import KIND

H100, H200, A100, V100 = (SPECS[card] for card in ("H100", "H200", "A100", "V100"))


@pytest.fixture(autouse=True)
def forget():
    yield
    kernels._cards.cache_clear()


def test_the_tables_are_what_the_script_writes():
    """Of the H100's convolutions a tenth, those in single precision; other cards' as a whole."""

    def stored(name: str, wanted) -> list[list[str]]:
        with open(kernels.DATA / f"{name}.csv", encoding="utf-8", newline="") as file:
            return [list(row.values()) for row in csv.DictReader(file) if wanted(row)]

    def text(rows) -> list[list[str]]:
        return [[str(value) for value in row] for row in rows]

    others = [row for card in tables.PUBLISHED for row in tables.convolution_rows(card)]
    assert stored("convolutions", lambda row: row["card"] != H100.name) == text(others)
    single = stored("convolutions", lambda row: row["card"] == H100.name and row["dtype"] == "float32")
    assert single == text(tables.convolution_rows("H100", "float32"))
    assert stored("attention", lambda row: row["card"] == H100.name) == text(tables.attention_rows("H100"))


def test_a_card_has_its_own_rows_or_those_of_its_capability():
    found = kernels.measured_rows("convolutions", H100, *KIND)
    assert len(found) > 200 and all(row["source"] and "cuDNN" in row["versions"] for row in found.values())
    assert all(kernels.measured_rows("convolutions", card, *KIND) == found for card in (H200, SPECS["B200"]))
    others = {"A100-80GB": "NeuSight (MIT, 2024)", "V100-32GB": "DeepBench (Apache-2.0, 2019)", "RTX 2080 Ti": "dlperf"}
    for card, source in others.items():
        rows = kernels.measured_rows("convolutions", SPECS[card], *KIND).values()
        assert any(source in row["source"] for row in rows)
    assert not kernels.measured_rows("convolutions", SPECS["RTX 3090"], *KIND)
    assert not kernels.measured_rows("attention", V100, "by")


def test_of_what_others_published_half_of_the_shapes_are_the_judge():
    """Of the kind that most cards have, 3x3 in single precision, the other half's median is what the table says of it."""
    logs = [
        found.log for found in published.convolutions() if found.source == "sitar-lab/NeuSight" and not found.fitted
    ]
    assert len(logs) > 100 and abs(median(logs)) < math.log(1.1) and within(logs, 30) > 0.7


def test_of_a_card_that_was_measured_both_times_are_compared(tmp_path):
    before = kernels_of_a_card.rows("convolution", "H200")[:40]
    with open(tmp_path / "h200_profiled.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["family", "settings", "fresh"])
        writer.writerows([row.family, json.dumps(row.settings), 2 * row.fresh] for row in before)
    assert tables.compared(tmp_path / "h200_profiled.csv", before) == "convolution: 40 kernels, 2.000 times"


def test_a_new_card_is_measured_and_has_rows(tmp_path, monkeypatch):
    """As `make gpu` does it, with twice what the clock's own rule says in place of a GPU: every third row is too large for it."""
    card, calls = tables.Kernels(A100), []

    def call(family, settings):
        calls.append(settings)
        if len(calls) % 3 == 0:
            raise torch.OutOfMemoryError
        return family, settings

    def profiled(one, flush):
        family, settings = one
        if family != "convolution":
            return 100.0
        return 2e6 * tables.convolutions.by_the_rule(card, tables.convolution_pass(settings, card))

    some = kernels_of_a_card.sample(("convolution", "attention", "masked_attention"))[:600]
    stand_ins = {"sample": lambda families: some, "TABLES": tmp_path, "DEVICE": "meta", "call": call}
    for name, stand_in in (stand_ins | {"profiled": profiled, "versions": lambda: "PyTorch 9.9"}).items():
        monkeypatch.setattr(kernels_of_a_card, name, stand_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: A100.name)
    monkeypatch.setattr(kernels, "DATA", tmp_path / "data")
    tables.main(["--measure"])
    with open(tmp_path / "a100_profiled.csv", encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == 400
    kernels._cards.cache_clear()
    found = kernels.measured_rows("convolutions", A100, *KIND)
    factors = [float(row["factor"]) for row in found.values()]
    assert len(factors) > 10 and all(math.isclose(factor, 2, abs_tol=0.01) for factor in factors)
    assert next(iter(found.values()))["versions"] == "PyTorch 9.9"
    assert ("flash", "backward", "16") in kernels.measured_rows("attention", A100, "by", "pass", "bits")


def test_a_card_that_is_unknown_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GeForce 256")
    with pytest.raises(SystemExit, match=re.escape("GeForce 256 is not in")):
        tables.main(["--measure"])


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tables.main(["--measure"])
    assert "no GPU here" in capsys.readouterr().out
