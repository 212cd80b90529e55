"""The table of `fit`: what it marks, what it says below; prices."""

import pytest

from virtualgpu.hardware.specs import SPECS
from virtualgpu.run.fit import table as fit_prices
from virtualgpu.run.fit import table as fit_table
from virtualgpu.run.fit.search import Trial
from virtualgpu.run.fit.table import Price

GIB = 2**30


def fits(gpus=1, reserved=4 * GIB, step=0.5, samples=8, **values):
    return Trial("T4", gpus, values, "fits", reserved, 16 * GIB, step, gpus, samples=samples, used=gpus)


def said(trials, words, **options):
    (line,) = [line for line in fit_table.lines(trials, {}, **options) if words in line]
    return line


def test_an_option_that_changes_nothing_is_said():
    line = said([fits(n="1"), fits(n="2")], "changed nothing")
    assert line == "n changed nothing: the same memory and time for 1, 2. Does the program heed it?"
    for trials in ([fits(n="1"), fits(n="2", step=0.6)], [fits(n="1")], [fits(gpus=1, n="1"), fits(gpus=2, n="1")]):
        assert not [line for line in fit_table.lines(trials, {}) if "changed nothing" in line]


def test_what_leaves_little_room_is_tight():
    line = said([fits(n="1"), fits(n="2", reserved=15 * GIB)], "tight: ")
    assert line.startswith("tight: T4 n=2: less than a tenth of the card is left")
    assert "fits, tight" in fit_table.lines([fits(reserved=15 * GIB)], {})[1]


def test_a_step_that_waits_for_its_host_is_said():
    waits, works = fits(n="1")._replace(working=0.27), fits(n="2", step=0.6)._replace(working=0.98)
    line = said([waits, works], "bound by the host")
    assert line.startswith("bound by the host: T4 n=1: the GPU works 27 % of a step")
    for trials in ([works], [fits()], [fits(gpus=2)._replace(working=0.27)]):  # of several, one may wait for another
        assert not [line for line in fit_table.lines(trials, {}) if "bound by" in line]


def test_the_largest_of_a_search():
    trials = [fits(n="8"), fits(n="16"), Trial("T4", 1, {"n": "32"}, "out of memory")]
    assert said(trials, "Largest", searched="n") == "Largest that fits: T4: n=16."
    trials[1] = fits(n="16", reserved=15 * GIB)
    assert said(trials, "Largest", searched="n") == "Largest that fits: T4: n=16 (8 leaves a tenth)."


def test_what_was_not_timed():
    assert said([fits(step=None, samples=None)._replace(ranks=0)], "no optimizer step was seen")
    assert said([fits(step=None)], "one optimizer step was seen")


def test_failures_are_named_where_not_all_fail_so():
    bad = [Trial("T4", gpus, {}, "failed", words="KeyError: 1") for gpus in (2, 4)]
    assert said([fits(), *bad], "failed: ") == "failed: 2 x T4, 4 x T4: KeyError: 1"
    assert said(bad, "failed: ") == "failed: KeyError: 1"


def test_the_cheapest_is_of_samples_where_all_know_them():
    one, two = fits(gpus=1, step=1.0, samples=16), fits(gpus=2, step=0.6, samples=16)
    told = fit_table.lines([one, two], {"T4": Price(1.0, "me", "2026")})
    assert "$ per million samples" in told[0] and told[1].endswith("<") and "83 %" in told[2]
    assert told[4] == "$ per GPU and hour: T4 1.00 (me, 2026). --prices FILE takes yours."
    told = fit_table.lines([one, two._replace(samples=None)], {"T4": Price(1.0)})
    assert "$ per 1,000 steps" in told[0] and "samples/s" not in told[0]


def test_the_cheapest_leaves_room_where_one_does():
    roomy, full = fits(step=1.0, samples=16), fits(step=0.5, samples=16)
    full = full._replace(reserved=int(0.95 * full.capacity))
    for trials, marked in (([roomy, full], 1), ([full, full._replace(step=0.6)], 1)):
        told = fit_table.lines(trials, {"T4": Price(1.0)})
        assert [line.endswith("<") for line in told[1:3]].index(True) + 1 == marked


def test_the_dated_prices_are_of_cards_that_there_are():
    prices = fit_prices.load()
    assert prices.keys() <= SPECS.keys() and all(p.usd_per_hour > 0 and p.provider and p.as_of for p in prices.values())
    assert fit_prices.price_of("a100", prices) == prices["A100"] and fit_prices.price_of("my.toml", prices) is None
    assert "V100-32GB no price" in fit_prices.whose(["T4", "V100-32GB"], prices)


@pytest.mark.parametrize("rows, why", [
    ("card,dollars\nT4,1", "there is no usd_per_hour"),
    ("card;usd_per_hour\nT4;1", "there is no card and no usd_per_hour"),
    ("", "there is no card and no usd_per_hour"),
    ("card,usd_per_hour", "there is no row"),
    ("card,usd_per_hour\nL4,1\nT4,cheap", "line 3: T4 at 'cheap': write .* above 0, as in 0.35"),
    ("card,usd_per_hour\nT4", "line 2: T4 at None"),
    *[(f"card,usd_per_hour\nT4,{price}", f"line 2: T4 at '{price}'") for price in ("nan", "-1", "inf", "0", "")],
    ("card,usd_per_hour\n,1", "a card without a name"),
    ("usd_per_hour,card\n1", "a card without a name"),
    ("card,usd_per_hour\nT4,0,35", "line 2: T4 has a field too many: .* behind a point"),
    ("card,usd_per_hour,provider,as_of\nT4,1,35,me,2026", "field too many"),
    ("card,usd_per_hour,provider,as_of\nT4,1,35,me", "field too many"),
    ('card,usd_per_hour\nT4,"0,35"', "line 2: T4 at '0,35'"),
    ("card,usd_per_hour\nT4,1\nt4 ,2", "line 3: t4 has a price already"),
    ("card,usd_per_hour\nT4," + 140_000 * "1", "field larger than field limit"),
])  # fmt: skip
def test_a_table_of_prices_that_is_none(tmp_path, rows, why):
    (tmp_path / "prices.csv").write_text(rows + "\n" * bool(rows))
    with pytest.raises(ValueError, match=rf"prices\.csv: .* columns card and usd_per_hour \(.*{why}"):
        fit_prices.load(str(tmp_path / "prices.csv"))


def test_a_table_of_prices_from_a_spreadsheet(tmp_path):
    """Which begins it with a byte order mark, and ends its lines as Windows does."""
    (tmp_path / "prices.csv").write_bytes(b"\xef\xbb\xbfcard,usd_per_hour\r\nT4 ,0.35\r\n\r\n")
    assert fit_prices.load(str(tmp_path / "prices.csv")) == {"T4": Price(0.35)}
