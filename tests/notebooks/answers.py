"""What the tests of the graders share: a table of answers, each the lesson's solution with a change of its text or code of its own."""

import ast
import builtins
import contextlib
import functools
import re
import symtable
from collections.abc import Callable, Iterable

import pytest
import series

PASSED = "[passed]"


@functools.cache
def cells(number: str) -> list[str]:
    """The code of each cell of this lesson."""
    (path,) = (path for path in series.notebooks() if path.name.startswith(number))
    return [cell.source for cell in series.code_cells(series.read(path))]


def _bound(sources: list[str]) -> dict[str, tuple[int, int, ast.stmt]]:
    """{name: (cell, statement, code)} of the imports, functions, classes and values of these cells; the last that binds a name counts."""
    found: dict[str, tuple[int, int, ast.stmt]] = {}
    for place, source in enumerate(sources):
        with contextlib.suppress(SyntaxError):  # a line of IPython's
            for number, part in enumerate(ast.parse(source).body):
                match part:
                    case ast.Import() | ast.ImportFrom():
                        names = [alias.asname or alias.name.partition(".")[0] for alias in part.names]
                    case ast.FunctionDef() | ast.ClassDef():
                        names = [part.name]
                    case ast.Assign():
                        names = [n.id for target in part.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
                    case _:
                        names = []
                found |= dict.fromkeys(names, (place, number, part))
    return found


def _used(source: str) -> set[str]:
    """The global names that this code reads, within its functions as well."""
    scopes, found = [symtable.symtable(source, "", "exec")], set()
    for scope in scopes:
        scopes += scope.get_children()
        top = scope.get_type() == "module"
        found |= {s.get_name() for s in scope.get_symbols() if s.is_referenced() and (top or s.is_global())}
    return {name for name in found if not hasattr(builtins, name)}


def defined(number: str, *names: str, until: int | None = None, **given) -> dict:
    """These names of a lesson, and those that they use: from the cells before this one, and nothing else of them is run. given: others."""
    bound, waiting = _bound(cells(number)[:until]), [*names]
    for name in waiting:
        if name in bound and name not in given:
            waiting += _used(ast.unparse(bound[name][2])) - {*waiting}
    needed = {bound[name] for name in waiting if name in bound and name not in given}
    found = {"__name__": "answers", **given}  # no module: what is defined here goes to other processes by value
    for _, _, part in sorted(needed, key=lambda one: one[:2]):
        exec(compile(ast.Module([part], []), f"lesson {number}", "exec"), found)
    return found


def solution(number: str, names: str, *changes: str, **given) -> list:
    """What a reader has by these names after the lesson's solution, with changes of its text: old, new, old, new ..."""
    first = re.match(r"\w+", names)[0]
    binds = re.compile(rf"^(def {first}\(|class {first}\b|{first} = )", re.M)
    sources = cells(number)
    (place,) = (place for place, cell in enumerate(sources) if "@title Solution" in cell and binds.search(cell))
    text = sources[place].rsplit("\nchecks.", 1)[0]
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text, f"the solution has no {old!r}:\n{text}"
        text = text.replace(old, new)
    found = defined(number, *_used(text + f"\n[{', '.join(names.split())}]"), until=place, **given)
    exec(compile(text, f"answer {number}", "exec"), found)
    return [eval(name, found) for name in names.split()]


def table(grader: Callable, number: str, names: str, rows: Iterable, *more, **given) -> Callable:
    """A test of these rows (answer, what the grader says of it). An answer is a change of the solution's text (old, new, ...), or an
    object of its own. more: what the grader has beside it. given: what stands for names of the lesson."""

    def name_of(value):
        return value[-1] if isinstance(value, tuple) and value else getattr(value, "__name__", None)

    @pytest.mark.parametrize("answer, said", rows, ids=name_of)
    def test(says, answer, said):
        answers = solution(number, names, *answer, **given) if isinstance(answer, tuple) else [answer]
        says(said, grader, *answers, *more)

    return test
