"""Set up .venv: once, and again only when a requirement changed. Standard library only: it runs before anything is installed.

uv installs where the registry has it, and pip where it has not. CPU=1 in the environment takes PyTorch without CUDA from PyTorch's own index.

A finished set-up leaves a stamp. No stamp means that the last one was cut off: the folder is made anew, since a
half-written package cannot be told from a whole one. Only a folder with our mark is: what somebody else made is used where the
project is installed in it, and never removed.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "finished"
MARK = VENV / "made-by-make"  # the first thing in it, and the last to go
INPUTS = ("requirements.txt", "constraints.txt", "pyproject.toml", "virtualgpu/pyproject.toml")
INSTALLED = ("-e", "./virtualgpu", "-e", ".[dev]")
# GB wanted on the disk, and what stays: on Linux the registry's PyTorch brings CUDA (9.7 with pip's download beside it)
SPACE = {"cuda": (10, 7), "cpu": (3, 2)}
CPU_INDEX = os.environ.get("PYTORCH_INDEX", "https://download.pytorch.org/whl/cpu")
# pip's settings, and what uv calls them
AS_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}


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
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("Another set-up works in this folder: this one waits for its end.", flush=True)
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
        free = shutil.disk_usage(VENV if VENV.exists() else ROOT).free / 1e9  # it may be a link to another disk
        cuda = sys.platform == "linux" and not os.environ.get("CPU")
        needed, kept = SPACE["cuda" if cuda else "cpu"]
        if free < needed:
            print(
                f"{free:.1f} GB free on this disk, about {needed} GB are needed on this system (PyTorch is large). Free some, then try again."
            )
            return 1
        VENV.mkdir(exist_ok=True)
        MARK.touch()
        print(f"Setting up .venv: a few minutes and about {kept} GB, the first time only.", flush=True)
        if cuda and not shutil.which("nvidia-smi"):
            print(
                "No NVIDIA driver is here: interrupt, and `make CPU=1 setup` takes PyTorch without CUDA, about 2 GB in all.",
                flush=True,
            )
        try:  # here, not in a process of its own: interrupted, that would show a traceback
            venv.EnvBuilder(with_pip=True, symlinks=os.name != "nt").create(VENV.resolve())  # it takes no link
        except (SystemExit, subprocess.CalledProcessError):
            print("Python could not make a virtual environment. On Debian and Ubuntu: apt install python3-venv")
            return 1
        if shutil.which("realpath"):  # macOS has it from 13 on
            with open(VENV / "pyvenv.cfg", "a", encoding="utf-8") as settings:
                settings.write("relocatable = true\n")  # uv then writes scripts that find their Python beside them
    MARK.touch()  # older set-ups have none
    STAMP.unlink(missing_ok=True)
    done = with_uv()
    if not done and os.environ.get("CPU") and not index_answers():
        print(f"{CPU_INDEX} does not answer: name a mirror (PYTORCH_INDEX=... make CPU=1 setup), or leave CPU=1 out.")
        return 1
    if not (done or with_pip()):
        print(
            "The requirements could not be installed; pip's own message is above. Is there a network? Then try again."
        )
        return 1
    can_be_moved()
    half_written = STAMP.with_suffix(".part")
    half_written.write_text(wanted(), encoding="utf-8")
    os.replace(half_written, STAMP)
    return 0


def can_be_moved() -> None:
    """With the project's folder, which pip has noted by its path; and one in Korean would stop Python 3.11 in an ASCII locale."""
    for path in VENV.glob("[Ll]ib/**/site-packages/__editable__.*.pth"):
        if path.read_text("utf-8").strip() == str(ROOT):
            path.write_text(os.path.relpath(ROOT, path.parent) + "\n", encoding="utf-8")


def with_uv() -> bool:
    """In a third of pip's time, from the same places, by pip's rule: the best version of all of them."""
    pip = [python_in_venv(), "-m", "pip"]
    get = [*pip, "install", "-q", "--disable-pip-version-check", "-c", "constraints.txt", "uv"]
    if subprocess.run(get, cwd=ROOT).returncode:
        return False
    of_pip = subprocess.run([*pip, "config", "list"], stdout=subprocess.PIPE, text=True).stdout
    settings = dict(re.findall(r"^\S+\.([\w-]+)='(.*)'$", of_pip, re.M))
    environ = {AS_UV[name]: value for name, value in settings.items() if name in AS_UV} | dict(os.environ)
    if environ.get("LC_ALL") in ("C", "POSIX"):  # it compiles with the new Python: see can_be_moved()
        environ["LC_ALL"] = "C.UTF-8"
    uv = [python_in_venv(), "-m", "uv", "pip", "install", "--python", python_in_venv(), "--compile-bytecode"]
    done = subprocess.run([*uv, "--index-strategy=unsafe-best-match", *wanted_packages()], cwd=ROOT, env=environ)
    if done.returncode:
        print("uv could not install the requirements.", flush=True)
    return not done.returncode


def with_pip() -> bool:
    command = [python_in_venv(), "-m", "pip", "install", "--disable-pip-version-check", *wanted_packages()]
    return not subprocess.run(command, cwd=ROOT).returncode


def index_answers() -> bool:
    """Where PyTorch's own does not, pip asks it for each package, half an hour in all, and takes PyTorch with CUDA in the end."""
    pip = [python_in_venv(), "-m", "pip", "index", "versions", "--retries", "1", "--index-url", CPU_INDEX, "torch"]
    nowhere_else = os.environ | {"PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
    return not subprocess.run(pip, env=nowhere_else, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def wanted_packages() -> list[str]:
    without_cuda = ["--extra-index-url", CPU_INDEX] if os.environ.get("CPU") else []
    return ["-c", "constraints.txt", *INSTALLED, *without_cuda, *([] if sys.stdout.isatty() else ["--quiet"])]


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
