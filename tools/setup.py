"""Set up .venv: once, and again only when a requirement changed. Standard library only: it runs before anything is installed.

A finished set-up leaves a stamp. No stamp means that the last one was cut off: the folder is made anew, since a
half-written package cannot be told from a whole one. Only a folder with our mark is: what somebody else made is used where the
project is installed in it, and never removed.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "finished"
MARK = VENV / "made-by-make"  # the first thing in it, and the last to go
INPUTS = ("requirements.txt", "constraints.txt", "pyproject.toml", "virtualgpu/pyproject.toml")
INSTALLED = ("-e", "./virtualgpu", "-e", ".[dev]")
# GB wanted on the disk, and what stays: Linux gets torch's CUDA build (9.7 with pip's download beside it), other systems one without
SPACE = {"linux": (10, 6), "elsewhere": (3, 2)}


def wanted() -> str:
    """What a finished set-up was made from: the Python version, then a digest of what says what is wanted."""
    digest = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in INPUTS)).hexdigest()
    return f"{sys.version_info[0]}.{sys.version_info[1]} {digest}"


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - an older one may well start this file
        print(f"This is Python {sys.version.split()[0]}; 3.11 or newer is needed. Try: make PYTHON=python3.12 ...")
        return 1
    with open(ROOT / "pyproject.toml") as lock_file:
        wait_for_others(lock_file)
        found = STAMP.read_text("utf-8") if STAMP.exists() else ""
        if found == wanted() and python_in_venv().exists():
            return 0
        try:
            if not found and not is_ours():
                return use_as_it_is()
            return install(fresh=found.split(" ")[0] != wanted().split(" ")[0] or not python_in_venv().exists())
        except KeyboardInterrupt:
            print("\nSet-up interrupted. The same command, given again, repairs it.")
            return 130
        except OSError as error:
            print(
                f".venv could not be written ({error.strerror}): copy the project to a folder of yours that has room."
            )
            return 1


def wait_for_others(lock_file) -> None:
    """Two makes at once would install into one folder: the second waits. A killed process lets go of its lock."""
    try:
        import fcntl
    except ImportError:  # Windows: one at a time is up to the user
        return
    fcntl.flock(lock_file, fcntl.LOCK_EX)


def is_ours() -> bool:
    """Made by this file, or still to be made."""
    return MARK.exists() or not os.path.lexists(VENV) or (VENV.is_dir() and not any(VENV.iterdir()))


def use_as_it_is() -> int:
    """What somebody else made, where the project is installed in it: pip installs that last, after all that it needs."""
    asked = [python_in_venv(), "-I", "-c", "import importlib.metadata; importlib.metadata.version('beyond-one-gpu')"]
    if not VENV.is_dir():
        kind = "a link to nothing" if VENV.is_symlink() else "a file"
        print(f".venv is {kind}, and set-up needs that name: rename or remove it, then try again.")
    elif python_in_venv().exists() and not subprocess.run(asked, stderr=subprocess.DEVNULL).returncode:
        print(".venv was made by hand: make uses it as it is. Where make should keep it up to date, remove it first.")
        return 0
    else:
        pip = f"{python_in_venv().relative_to(ROOT)} -m pip install -c constraints.txt {shlex.join(INSTALLED)}"
        print(f".venv was made by hand, and the project is not installed in it: {pip}, or remove it, then try again.")
    return 1


def install(fresh: bool) -> int:
    if fresh:
        if MARK.exists() or STAMP.exists():
            print("The set-up in .venv was cut off, or made by another Python: starting over.")
            clear()
        free = shutil.disk_usage(ROOT).free / 1e9
        needed, kept = SPACE.get(sys.platform, SPACE["elsewhere"])
        if free < needed:
            print(
                f"{free:.1f} GB free on this disk, about {needed} GB are needed on this system (PyTorch is large). Free some, then try again."
            )
            return 1
        VENV.mkdir(exist_ok=True)
        MARK.touch()
        print(f"Setting up .venv: a few minutes and about {kept} GB, the first time only.", flush=True)
        made = subprocess.run([sys.executable, "-m", "venv", VENV.resolve()])  # venv takes no link
        if made.returncode:
            print("Python could not make a virtual environment. On Debian and Ubuntu: apt install python3-venv")
            return 1
    MARK.touch()  # older set-ups have none
    STAMP.unlink(missing_ok=True)
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    pip = [python_in_venv(), "-m", "pip", "install", "--disable-pip-version-check", *quiet]
    if subprocess.run([*pip, "-c", "constraints.txt", *INSTALLED], cwd=ROOT).returncode:
        print("pip could not install the requirements; its own message is above. Is there a network? Then try again.")
        return 1
    half_written = STAMP.with_suffix(".part")
    half_written.write_text(wanted(), encoding="utf-8")
    os.replace(half_written, STAMP)
    return 0


def clear() -> None:
    """The mark stays: killed in the middle, the next call knows the folder."""
    MARK.touch()
    for path in VENV.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != MARK:
            path.unlink()


def python_in_venv() -> Path:
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


if __name__ == "__main__":
    sys.exit(main())
