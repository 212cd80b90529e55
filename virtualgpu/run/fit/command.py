"""The command of a trial: values put into it, and how many samples a step of it has."""

import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

PRODUCT = re.compile(r"\d+(\.\d+)?(\s*[*/]\s*\d+(\.\d+)?)*")
OF_EVALUATION = re.compile(r"eval|valid|val_|val-|test|predict")


def put(word: str, values: Mapping[str, str]) -> str:
    """The word with each {name} in it replaced by that one's value."""
    for name, value in values.items():
        word = word.replace("{" + name + "}", value)
    return word


def filled(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command with these values: for {name}, for the option --name (or --na_me, or name=), or added as --name=value."""
    words = [put(word, values) for word in command]
    used = {"gpus", *(name for name in values if any("{" + name + "}" in word for word in command))}
    for name, value in values.items():
        if name in used:
            continue
        names = {name, name.replace("-", "_"), name.replace("_", "-")}
        for index, word in enumerate(words):
            option, equals, _ = word.partition("=")
            if equals and option in names | {f"--{name}" for name in names}:
                words[index] = f"{option}={value}"
            elif not equals and option.startswith("--") and option[2:] in names and index + 1 < len(words):
                words[index + 1] = value
            else:
                continue
            break
        else:
            words.append(f"--{name}={value}")
    return words


def batch(words: Sequence[str], values: Mapping[str, str]) -> int | None:
    """The batch size: of the one among `values`, or else among the command's options, that has "batch" in its name and a number for it.

    Options of evaluation do not count. None without one, or with several.
    """
    options = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option.startswith("--") or equals:
            options[option] = value if equals else after
    for named in (values, options):
        numbers = [
            int(value)
            for name, value in named.items()
            if "batch" in name.lower() and value.isdigit() and not OF_EVALUATION.search(name)
        ]
        if numbers:
            return numbers[0] if len(numbers) == 1 else None
    return None


def product(formula: str) -> int:
    """Of "8*16*2". Raises ValueError where it is none."""
    if not PRODUCT.fullmatch(formula.strip()):
        raise ValueError(f"--samples: {formula!r} is no product of numbers, such as '{{batch-size}}*{{gpus}}*4'")
    number = Fraction(1)
    for sign, factor in re.findall(r"([*/]?)\s*([\d.]+)", formula):
        if sign == "/" and not Fraction(factor):
            raise ValueError(f"--samples: {formula!r} divides by 0")
        number = number / Fraction(factor) if sign == "/" else number * Fraction(factor)
    return round(number)


def rows(shapes: Iterable[tuple[Sequence[int], int]], passes: int, batch: int, ranks: int, gpus: int) -> int | None:
    """Samples of one rank's step, where the program's own batch size is `batch`; None where no shape has it.

    shapes: a rank's, each with its calls; passes: its backward passes. The batch stands first or second in them; as it is, divided among the ranks, or, in a program of
    one process, times the GPUs that it is spread over.
    """
    shapes = list(shapes)
    sizes = [(0, batch), (1, batch)]
    if ranks > 1:
        sizes += [(0, batch // ranks)] * (batch % ranks == 0)
    else:
        sizes += [(0, batch * gpus)]
    for place, size in sizes:
        if size and shapes and all(len(shape) > place and shape[place] == size for shape, _ in shapes):
            return size * max(1, min(passes, sum(calls for _, calls in shapes)))
    return None
