"""Execute the notebooks top to bottom, then build the site of them: what `make run` and `make store` call.

    run.py                    all notebooks; executed copies under build/, the site under build/site/
    run.py --store            the same, and keep the outputs in notebooks/ (what nbval compares against); an output that says what it
                              said stays as it was, a measured one, too
    run.py --store --anew     and take each output as it came
    run.py --stored           no execution: the site of the outputs that are kept
    run.py --check            executed, and nothing kept: does each reach its end?
    run.py 01 05              only these
    run.py --jobs 1           one after the other: by default one more runs at a time than there are cores, three at most

A notebook that fails does not stop the others; the last table says which cell failed and why, and the exit status is 1.
"""

import argparse
import asyncio
import contextlib
import errno
import json
import os
import re
import shutil
import sys
import textwrap
import time
from pathlib import Path

import lesson_text
import nbformat
import series
import stamp
import website
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbval.plugin import get_sanitize_patterns
from tqdm import tqdm

from virtualgpu import scratch
from virtualgpu.run import launcher
from virtualgpu.run.ranks import forkserver
from virtualgpu.run.trials import ended_by_sigterm

CELL_LIMIT = 600  # seconds
DAMAGED = " (too little memory? free some; or a damaged set-up? make clean, then make run)"
ENVIRONMENT = {
    "TQDM_DISABLE": "1",  # a bar redrawn is never the same output twice
    "JUPYTER_PREFER_ENV_PATH": "1",  # this environment's kernel, not one of the same name in the user's home
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}


def main(arguments: list[str] | None = None) -> int:
    """The exit status. What was kept before is whole, also where a disk is full."""
    try:
        with ended_by_sigterm():
            return _main(arguments)
    except OSError as error:
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # of a folder's files the first
        print(f"Not all was written: {why}. What was there before is as it was; {cure(error)}, then run it again.")
        return 1


def cure(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)
    return "free some space" if full else "mend that"


def _main(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="the beginning of a notebook's name: 01")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--store", action="store_true", help="keep the outputs in notebooks/")
    parser.add_argument("--anew", action="store_true", help="with --store: measured outputs, too")
    mode.add_argument("--check", action="store_true", help="neither a site nor times")
    mode.add_argument("--stored", action="store_true", help="do not execute: the site of the kept outputs")
    # one more than cores: notebooks of Ray and of torchrun wait half of their time for processes to begin
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1) + 1, help="how many run at a time")
    options = parser.parse_args(arguments)

    chosen = [path for path in lesson_text.lessons() if not options.only or path.name.startswith(tuple(options.only))]
    if not chosen:
        names = ", ".join(path.stem for path in series.notebooks())
        print(
            f"No notebook's name begins with {' or '.join(options.only) or 'a number'}. There are: {names or 'none'}."
        )
        return 2
    try:
        with series.alone():
            return work(chosen, options)
    except KeyboardInterrupt:
        print("\nInterrupted: the kernel was stopped; what had finished is under build/.")
        return 130


def work(chosen: list[Path], options: argparse.Namespace) -> int:
    """Execute these as the options say, keep what they say, and build the site: the exit status."""
    os.environ.update(ENVIRONMENT)
    if options.store:
        for path in chosen:
            stamp.stamp_lesson(path, fix=True)
        os.environ["HELPERS_GPUS"] = "virtual"  # outputs that every machine can repeat
    # what is kept is measured on a machine that does nothing else
    jobs = 1 if options.store else max(1, options.jobs)
    share_cores(jobs)
    start = time.perf_counter()
    if options.stored:
        results = [{"path": path, "seconds": None, "error": None} for path in chosen]
    else:
        results = asyncio.run(execute_all(chosen, jobs))
    for path, result in zip(chosen, results, strict=True):
        if options.store and not result["error"]:
            executed = series.read(result["path"])
            if path.exists() and not options.anew:
                keep(series.read(path), executed)
            write(path, text_of(executed))
    seconds = time.perf_counter() - start
    if not options.check:
        note_times(results)
    report(results, seconds)
    whole = options.check or site_of(results)
    return int(not whole or any(result["error"] for result in results))


def share_cores(jobs: int) -> None:
    """So many processes at a time, each with its share of the cores: threads of both on all of them take a tenth longer."""
    if jobs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))


def site_of(results: list[dict]) -> bool:
    """Build the site of these, and of the stored outputs of the others. Is it whole?"""
    executed = {result["path"].name: result for result in results}
    lessons = [executed[path.name]["path"] if path.name in executed else path for path in series.notebooks()]
    seconds = {result["path"].stem: result["seconds"] for result in results if result["seconds"] is not None}
    broken, bare = [], []
    for path in lessons:
        try:
            cells = series.code_cells(series.read(path))
        except ValueError as error:
            broken.append(str(error))
        else:
            bare += [path.stem] * (bool(cells) and not any(cell.outputs for cell in cells))
    if bare:
        print(f"Without outputs on the site: {', '.join(bare)}. `make store` executes and keeps them.")
    try:
        if broken:
            raise website.Broken("\n".join(["There is no site:", *broken]))
        print(f"The site: {website.build(lessons, seconds).relative_to(series.ROOT)}")
    except website.Broken as error:
        print(error)
        return False
    return True


async def execute_all(paths: list[Path], jobs: int) -> list[dict]:
    """Run them, at most `jobs` at a time; cancelled (Ctrl-C), each ends its kernel. Results are in the order of `paths`.

    Several at a time, the longest are begun first: at the end no processor waits for a long one.
    """
    room = asyncio.Semaphore(jobs)

    async def one(path: Path) -> dict:
        async with room:
            return await execute(path)

    async with asyncio.TaskGroup() as group:
        tasks = {path: group.create_task(one(path)) for path in (paths if jobs == 1 else series.longest_first(paths))}
    return [tasks[path].result() for path in paths]


async def execute(path: Path) -> dict:
    """Run one notebook in a kernel of its own, in the notebook's folder; the copy is kept even where a cell failed."""
    try:
        notebook = lesson_text.paired(path)
    except ValueError as failure:
        print(f"[FAIL] {path.stem}", flush=True)
        return {"path": path, "seconds": None, "error": str(failure)}
    cells = series.code_cells(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    copy = series.BUILD / path.name
    at = 0
    error = None
    start = time.perf_counter()
    with tqdm(total=len(cells), desc=path.stem[:2], unit="cell", disable=not sys.stderr.isatty(), leave=False) as bar:
        client = NotebookClient(
            notebook,
            timeout=CELL_LIMIT,
            resources={"metadata": {"path": str(path.parent)}},
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
        )
        try:
            # cell by cell: client.execute() catches Ctrl-C itself and goes on without its kernel
            async with kernel(client):
                for at, cell in enumerate(cells, 1):  # noqa: B007 - it names the cell that failed
                    bar.set_postfix_str(cell.source.splitlines()[0][:40])
                    await client.async_execute_cell(cell, notebook.cells.index(cell))
                    bar.update()
                client.km.shutdown_wait_time = 60  # on a busy machine Ray ends later than Jupyter waits (5 s)
        except CellExecutionError as failure:
            error = f"cell {at} of {len(cells)}: {failure.ename}: {failure.evalue}"
        except CellTimeoutError:
            error = f"cell {at} of {len(cells)}: still running after {CELL_LIMIT} s"
        except DeadKernelError:
            error = f"cell {at} of {len(cells)}: the kernel died (out of memory?)"
        except Exception as failure:  # of jupyter_client, zmq, the system
            what = f"cell {at} of {len(cells)}: " if at else "the kernel did not start: "
            error = f"{what}{failure}{launcher.cure(str(failure)) or DAMAGED}"
    seconds = time.perf_counter() - start
    tidy(notebook)
    try:
        write(copy, text_of(notebook))
    except OSError as failure:
        error = error or f"its copy was not written: {failure}. {cure(failure).capitalize()}, then run it again"
        copy = path  # on the site
    print(f"{'[FAIL]' if error else '[ OK ]'} {path.stem:<36} {len(cells):>3} cells {seconds:7.1f} s", flush=True)
    return {"path": copy, "seconds": seconds, "error": error}


@contextlib.asynccontextmanager
async def kernel(client: NotebookClient):
    """A kernel for as long as it takes. nbclient's own async_setup_kernel would catch Ctrl-C."""
    # a kernel that may open fewer dies without a word
    forkserver.require_files(forkserver.OPEN_FILES, "the processes of a notebook")
    client.km = client.create_kernel_manager()
    client.km.shutdown_wait_time = 20  # seconds, not five: killed at its end, on a busy machine, it leaves its folders
    # of the file that says where the kernel listens: where this process is killed, the next removes it
    folder = scratch.folder()
    try:
        client.km.connection_file = os.path.join(folder, "kernel.json")
        await client.async_start_new_kernel()
        await client.async_start_new_kernel_client()
        yield
    finally:
        if client.km is not None and client.km.has_kernel:
            await client._async_cleanup_kernel()
        scratch.remove(folder)


def tidy(notebook) -> None:
    """Leave out what differs from machine to machine and teaches nothing, so that a stored notebook's diff is its change."""
    for cell in series.code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "error":  # nbval does not compare a traceback
                output.traceback = [line.replace(f"{series.ROOT}{os.sep}", "") for line in output.traceback]
        # elsewhere a path in an output is a fault, which a guard reports
        if "nbval-ignore-output" in series.tags(cell):
            for output in cell.outputs:
                if output.output_type == "stream":
                    output.name, output.text = "stdout", output.text.replace(str(Path.home()), "~")
    lesson_text.settle(notebook)


def keep(stored, executed) -> None:
    """Give each executed cell its stored outputs, where they say the same: as nbval compares them, and a picture by its words if it was
    measured. Of a cell that nbval does not compare they stay in any case. (Those of changed cells have gone before: lesson_text.paired.)"""
    for old, cell in zip(series.code_cells(stored), series.code_cells(executed), strict=True):
        if [said(output) for output in old.outputs] == [said(output) for output in cell.outputs] or (
            "nbval-ignore-output" in series.tags(cell) and old.outputs
        ):
            cell.outputs = old.outputs


def said(output) -> list:
    """What of an output has to be the same."""
    if output.output_type == "stream":
        return [output.name, sanitized(output.text)]
    if output.output_type == "error":
        return [output.ename, output.evalue]
    data = dict(output.data)
    if "(measured)" in data.get("text/plain", ""):
        data.pop("image/png", None)
    if "text/html" in data:
        data["text/html"] = MEASURED.sub(r"\1", data["text/html"])
    return [(kind, sanitized(value) if isinstance(value, str) else str(value)) for kind, value in sorted(data.items())]


def sanitized(text: str) -> str:
    """Without what truly varies, as in nbval; pictures within a page stay."""
    for pattern, words in SANITIZE:
        text = re.sub(pattern, words, text)
    return text


MEASURED = re.compile(
    r'(<img alt="Figure \(measured\)[^"]*"[^>]*?) src="data:[^"]+"'
)  # one within a page: by its words, too
SANITIZE = [
    (pattern, words)
    for pattern, words in get_sanitize_patterns((series.ROOT / "tests" / "sanitize.cfg").read_text("utf-8"))
    if words != "PICTURE"
]


def text_of(notebook) -> str:
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def write(path: Path, text: str) -> None:
    """Whole or not at all. Raises OSError; then the file is what it was."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def note_times(results: list[dict]) -> None:
    """For `python -m tests.bench`, which shows them: seconds of each notebook that ran to its end, the latest."""
    path = series.BUILD / "times.json"
    try:
        times = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, ValueError):  # ValueError: an older one may have been cut off
        times = {}
    times |= {r["path"].stem: round(r["seconds"], 1) for r in results if r["seconds"] is not None and not r["error"]}
    write(path, json.dumps(dict(sorted(times.items())), indent=1))


def report(results: list[dict], seconds: float) -> None:
    """What failed and why; how long all took together, several at a time."""
    failed = [result for result in results if result["error"]]
    if failed:
        print("\nFailed:")
        for result in failed:
            # whole: a launch says first which rank failed, and then why
            print(textwrap.indent(f"{result['path'].stem}: {result['error']}", "  "))
    if any(result["seconds"] is not None for result in results):
        print(f"\n{len(results) - len(failed)} of {len(results)} notebooks ran, in {seconds:.0f} s.")


if __name__ == "__main__":
    sys.exit(main())
