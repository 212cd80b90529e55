"""The versions and processors that the series promises to run with: what the weekly workflow calls.

nox                             all of them (each makes an environment of about 6 GB under .nox/, shared files once)
nox -s "test-3.13(newest)"      one
nox -s colab -- 05              one notebook as in Colab
nox -s "test-3.11(oldest)" -- -m judge tests    the random programs and sweeps of the judges with other versions
"""

import os

import nox

os.environ["UV_COMPILE_BYTECODE"] = "1"  # as pip does: the lessons start hundreds of processes that import PyTorch
nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True  # a session that is skipped has tested nothing, and must not be green
nox.options.sessions = [
    "test-3.11(oldest)",
    "test-3.12(pinned)",
    "test-3.13(newest)",
    "processors(default)",
    "processors(avx2)",
    "colab",
    "browser",
]  # 3.11 with the pinned versions is `make test`


@nox.session(python=["3.11", "3.12", "3.13"])
@nox.parametrize("versions", ["oldest", "pinned", "newest"], ids=["oldest", "pinned", "newest"])
def test(session: nox.Session, versions: str) -> None:
    """`make test` with the oldest versions that requirements.txt admits, those behind the stored outputs, or the newest.

    The second on one thread, which must not show either: it is the one whose outputs are all compared.
    """
    constraints = "constraints.txt"
    if versions != "pinned":
        constraints = (
            f"{session.virtualenv.location}/versions.txt"  # not create_tmp: it would move TMPDIR into the project
        )
        which = "lowest-direct" if versions == "oldest" else "highest"
        python = ["--python-version", session.python]
        session.run_install(
            "uv", "pip", "compile", "-q", "requirements.txt", "-o", constraints, "--resolution", which, *python
        )
    session.install(
        "-e", "./virtualgpu", "-e", ".[dev]", "pip", "-c", constraints
    )  # pip: a test builds the wheel with it
    options = [] if versions == "pinned" else ["--nbval-sanitize-with=tests/sanitize_versions.cfg"]
    chosen = session.posargs or ["-m", "not judge", "--nbval", "tests", "notebooks"]
    session.run(
        *("pytest", "-n", "logical", "--maxprocesses", "3", "--dist", "loadfile", *options, *chosen),
        env={"OMP_NUM_THREADS": "1"} if versions == "pinned" else {},
    )


# As on a processor without AVX, and with AVX2 alone: PyTorch's own kernels, oneDNN's and MKL's each ask for themselves
PROCESSORS = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
}


@nox.session(python="3.11")
@nox.parametrize("processor", list(PROCESSORS), ids=list(PROCESSORS))
def processors(session: nox.Session, processor: str) -> None:
    """Every stored output on another processor: a sum in another order must not show in what is compared."""
    session.install("-e", "./virtualgpu", "-e", ".[dev]", "-c", "constraints.txt")
    session.run(
        *("pytest", "-n", "2", "--dist", "loadfile", "--nbval", *(session.posargs or ["notebooks"])),
        env=PROCESSORS[processor],
    )


@nox.session(python="3.13")
def colab(session: nox.Session) -> None:
    """Each notebook alone in a folder, in Colab's environment: its set-up cell fetches the helpers and what is missing."""
    session.install("-r", "tests/colab/preinstalled.txt", "pip")
    session.run("python", "tests/colab/run.py", *session.posargs)


@nox.session(python="3.11")
def browser(session: nox.Session) -> None:
    """JupyterLab and the site in a real browser: chromium or Chrome must be there. Screenshots under build/."""
    session.install("-e", "./virtualgpu", "-e", ".[dev,browser]", "-c", "constraints.txt")
    session.run("pytest", "tests/browser", *session.posargs)
