"""How large the project is, and how its engine hangs together: the table of CONTRIBUTING.md.

python -m tools.sizes            print it
python -m tools.sizes --write    and put it there
"""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import series

PARTS = {
    "engine": "virtualgpu",
    "tests": "tests",
    "helpers": "helpers",
    "checks": "checks",
    "tools": "tools",
    "lessons' figures and scripts": "notebooks",
}


def imports(root: Path) -> dict[str, set[str]]:
    """Which module of a package imports which others of it, at its head or within a function; not for types alone."""
    package = root.name
    files = {".".join((package, *path.relative_to(root).with_suffix("").parts)): path for path in root.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in files.items()}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for_types = {
            node
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        said = set()
        for node in ast.walk(tree):
            if node in for_types:
                continue
            if isinstance(node, ast.Import):
                said |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                said |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        # of `from virtualgpu.engine import machine` the module, not its package too
        whole = said & set(modules)
        found[name] = {one for one in whole if not any(other.startswith(f"{one}.") for other in whole)} - {name}
    return found


def rooms(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same of the parts that the package's folder shows: its folders, and the modules beside them."""
    found: dict[str, set[str]] = {}
    for name, others in graph.items():
        if "." in name:  # the package's own __init__ is its face: it imports every room
            found.setdefault(room(name), set()).update(room(other) for other in others if "." in other)
    return {name: others - {name} for name, others in found.items()}


def room(module: str) -> str:
    return module.split(".")[1]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Names that import each other in a circle, or none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def table() -> str:
    rows = ["| part | Python files | lines |", "|---|---|---|"]
    for name, folder in PARTS.items():
        files = [path for path in (series.ROOT / folder).rglob("*.py") if "build" not in path.parts]
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        rows.append(f"| {name} (`{folder}/`) | {len(files)} | {lines:,} |")
    graph = rooms(imports(series.ROOT / "virtualgpu"))
    arrows = sum(map(len, graph.values()))
    circles = circle(graph)
    return "\n".join(
        [
            *rows,
            "",
            f"The engine has {len(graph)} rooms (its folders, and the modules beside them) and {arrows} arrows between them (one imports another); "
            + (f"a circle: {' → '.join(circles)}." if circles else "no circle."),
        ]
    )


def main() -> int:
    print(found := table())
    if "--write" in sys.argv[1:]:
        page = series.ROOT / "CONTRIBUTING.md"
        page.write_text(series.marked(page.read_text("utf-8"), "sizes", "sizes", found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
