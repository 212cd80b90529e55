"""A prediction beside its answer: nothing predicted, a number, a word."""

import pytest

import helpers


@pytest.mark.parametrize(
    "guess, answer, unit, said",
    [
        (None, 22.46, "ms", "simulated: 22.5 ms\nYou predicted nothing"),
        (45, 22.5, "ms", "simulated: 22.5 ms\nyou said: 45 ms (2 times too high)\n"),
        (10.0, 22.5, "ms", "you said: 10 ms (2.2 times too low)\n"),
        (22.5, 22.5, "", "simulated: 22.5\nyou said: 22.5\n"),
        (0, 4, "%", "simulated: 4 %\nyou said: 0 %\n"),
        ("DDP", "one GPU", "", "simulated: one GPU\nyou said: DDP\n"),
        ("many", 2048.0, "MiB", "simulated: 2,048 MiB\nyou said: many MiB\n"),
    ],
)
def test_reveal(capsys, guess, answer, unit, said):
    helpers.reveal(guess, answer, unit)
    assert said in capsys.readouterr().out


def test_what_was_measured_is_called_so(capsys):
    helpers.reveal(None, "no", origin="measured")
    assert capsys.readouterr().out.startswith("measured: no\n")
