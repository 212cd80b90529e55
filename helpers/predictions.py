"""The reader's prediction beside what came out. *Run all* passes a lesson in which nothing was predicted."""


def reveal(guess: float | str | None, answer: float | str, unit: str = "", origin: str = "simulated") -> None:
    """Print both, one below the other; for two numbers, how far apart they are.

    guess: None where the reader wrote none. unit: behind both ("ms", "GiB", "%"). origin: "simulated" or "measured".
    """
    print(f"{origin}: {_in_words(answer, unit)}")
    if guess is None:
        print("You predicted nothing: write your answer into the cell above, and run both again.")
    else:
        print(f"you said: {_in_words(guess, unit)}{_apart(guess, answer)}")


def _in_words(value: float | str, unit: str) -> str:
    if isinstance(value, float):
        value = f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value} {unit}".strip()


def _apart(guess: float | str, answer: float | str) -> str:
    if isinstance(guess, str) or isinstance(answer, str) or min(guess, answer) <= 0 or guess == answer:
        return ""
    return f" ({max(guess, answer) / min(guess, answer):.2g} times too {'high' if guess > answer else 'low'})"
