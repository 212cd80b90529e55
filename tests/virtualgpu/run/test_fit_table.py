"""The table of `fit`: the cheapest, the remarks below it, and the tables of prices that it takes."""

import re

import pytest

from virtualgpu.hardware.specs import SPECS
from virtualgpu.run.fit import table
from virtualgpu.run.fit.search import Trial
from virtualgpu.run.fit.table import Price

GIB = 2**30


def fits(gpus=1, reserved=4 * GIB, step: float | None = 0.5, samples: int | None = 8, working=None, ranks=1, **values):
    status = {"status": "fits", "reserved": reserved, "capacity": 16 * GIB, "step": step, "samples": samples}
    return Trial("T4", gpus, values, **status, ranks=ranks, used=gpus, working=working)


def failed(gpus):
    return Trial("T4", gpus, {}, "failed", words="KeyError: 1")


TIGHT = fits(n="16", reserved=15 * GIB)
LARGEST = [fits(n="8"), fits(n="16"), Trial("T4", 1, {"n": "32"}, "out of memory")]
UNHEEDED = "n changed nothing: the same memory and time for 1, 2. Does the program heed it?"
REMARKS = [  # trials, and a pattern of one line below the table, or what no line has ("!")
    ([fits(n="1"), fits(n="2")], re.escape(UNHEEDED) + "$"),
    ([fits(n="1"), fits(n="2", step=0.6)], "!changed nothing"),
    ([fits(n="1")], "!changed nothing"),
    ([fits(gpus=1, n="1"), fits(gpus=2, n="1")], "!changed nothing"),
    ([fits(n="1"), TIGHT], "tight: T4 n=16: less than a tenth of the card is left"),
    ([TIGHT], ".* fits, tight "),
    ([fits(n="1", working=0.27), fits(n="2", working=0.98)], "bound by the host: T4 n=1: the GPU works 27 % of a step"),
    ([fits(working=0.98)], "!bound by"),
    ([fits()], "!bound by"),
    ([fits(gpus=2, working=0.27)], "!bound by"),  # of several, one may wait for another
    (LARGEST, r"Largest that fits: T4: n=16\.$"),
    ([LARGEST[0], TIGHT, LARGEST[2]], r"Largest that fits: T4: n=16 \(8 leaves a tenth\)\.$"),
    ([fits(step=None, samples=None, ranks=0)], "no optimizer step was seen"),
    ([fits(step=None)], "one optimizer step was seen"),
    ([fits(), failed(2), failed(4)], "failed: 2 x T4, 4 x T4: KeyError: 1$"),
    ([failed(2), failed(4)], "failed: KeyError: 1$"),
]


@pytest.mark.parametrize("trials, pattern", REMARKS)
def test_remarks_below_the_table(trials, pattern):
    lines = table.lines(trials, {}, searched="n" if "Largest" in pattern else "")
    if pattern.startswith("!"):
        assert not [line for line in lines if pattern[1:] in line]
    else:
        assert len([line for line in lines if re.match(pattern, line)]) == 1, lines


def test_the_cheapest_is_of_samples_where_all_know_them_and_leaves_room_where_one_does():
    one, two = fits(gpus=1, step=1.0, samples=16), fits(gpus=2, step=0.7, samples=16)
    lines = table.lines([one, two], {"T4": Price(1.0, "me", "2026")})
    assert "$ / M samples" in lines[0] and lines[1].endswith("<") and "71 %" in lines[2]
    assert lines[5] == "$ per GPU and hour: T4 1.00 (me, 2026). --prices FILE takes yours."
    lines = table.lines([one, two._replace(samples=None)], {"T4": Price(1.0)})
    assert "$ / 1,000 steps" in lines[0] and "samples/s" not in lines[0]
    full = fits(step=0.5, samples=16, reserved=int(0.95 * 16 * GIB))
    for trials in ([one, full], [full, full._replace(step=0.8)]):
        marked = [line.endswith("<") for line in table.lines(trials, {"T4": Price(1.0)})[1:3]]
        assert marked == [True, False]


def test_no_price_decides_within_the_error_of_the_clock():
    close = [fits(gpus=1, step=1.0, samples=16), fits(gpus=2, step=0.6, samples=16)]
    lines = table.lines(close, {"T4": Price(1.0)})
    assert not any(line.endswith("<") for line in lines) and "less than the clock's error" in lines[3]
    lines = table.lines([*close, fits(gpus=4, step=0.5, samples=16)], {"T4": Price(1.0)})
    assert [line.endswith("<") for line in lines[1:4]] == [True, True, False]


def test_the_dated_prices_are_of_cards_that_there_are():
    prices = table.load()
    assert prices.keys() <= SPECS.keys() and all(p.usd_per_hour > 0 and p.provider and p.as_of for p in prices.values())
    assert table.price_of("a100", prices) == prices["A100"] and table.price_of("my.toml", prices) is None
    assert "V100-32GB no price" in table.whose(["T4", "V100-32GB"], prices)


HEAD = "card,usd_per_hour"


@pytest.mark.parametrize("rows, why", [
    ("card,dollars\nT4,1", "there is no usd_per_hour"),
    ("card;usd_per_hour\nT4;1", "there is no card and no usd_per_hour"),
    ("", "there is no card and no usd_per_hour"),
    (HEAD, "there is no row"),
    (HEAD + "\nL4,1\nT4,cheap", "line 3: T4 at 'cheap': write .* above 0, as in 0.35"),
    (HEAD + "\nT4", "line 2: T4 at None"),
    *[(f"{HEAD}\nT4,{price}", f"line 2: T4 at '{price}'") for price in ("nan", "-1", "inf", "0", "")],
    (HEAD + "\n,1", "a card without a name"),
    ("usd_per_hour,card\n1", "a card without a name"),
    (HEAD + "\nT4,0,35", "line 2: T4 has a field too many: .* behind a point"),
    (HEAD + ",provider,as_of\nT4,1,35,me,2026", "field too many"),
    (HEAD + ",provider,as_of\nT4,1,35,me", "field too many"),
    (HEAD + '\nT4,"0,35"', "line 2: T4 at '0,35'"),
    (HEAD + "\nT4,1\nt4 ,2", "line 3: t4 has a price already"),
    (HEAD + "\nT4," + 140_000 * "1", "field larger than field limit"),
])  # fmt: skip
def test_a_table_of_prices_that_is_none(tmp_path, rows, why):
    (tmp_path / "prices.csv").write_text(rows + "\n" * bool(rows))
    with pytest.raises(ValueError, match=rf"prices\.csv: .* columns card and usd_per_hour \(.*{why}"):
        table.load(str(tmp_path / "prices.csv"))


def test_a_table_of_prices_from_a_spreadsheet(tmp_path):
    """Which begins it with a byte order mark, and ends its lines as Windows does."""
    (tmp_path / "prices.csv").write_bytes(b"\xef\xbb\xbfcard,usd_per_hour\r\nT4 ,0.35\r\n\r\n")
    assert table.load(str(tmp_path / "prices.csv")) == {"T4": Price(0.35)}
