"""Inside a warm Python: scripts run as Python would run them, each in a process forked when PyTorch was loaded and nothing else had happened.

A script finds PyTorch not yet imported: virtual GPUs are on when it imports it, as everywhere, with the variables that it has set until then.
"""

import array
import contextlib
import ctypes
import gc
import importlib.util
import os
import signal
import socket
import sys
import types
from importlib.machinery import ModuleSpec, SourceFileLoader

from virtualgpu import environment
from virtualgpu.run.program import SITE

SET_NAME = 15  # linux/prctl.h, PR_SET_NAME: what top shows


def serve(number: int) -> None:
    """Until the other end of the socket closes. Each program has a process above it, which tells its number and how it ended."""
    load()  # and nothing of ours that needs it: that, too, may be a script's way to import it
    requests = socket.socket(fileno=number)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, rights, *_ = requests.recvmsg(1 << 20, socket.CMSG_SPACE(8))
        if not message:
            os._exit(0)
        output, telling = array.array("i", rights[0][2])
        if os.fork():
            os.close(output)
            os.close(telling)
            continue
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if not pid:
            os.close(telling)
            status = _run(message.decode(errors="surrogateescape").split("\0"), output)
            sys.exit(status)  # as a script ends, flushed and with atexit
        os.close(output)
        os.write(telling, b"%d\n" % pid)
        os.write(telling, b"%d\n" % os.waitpid(pid, 0)[1])
        os._exit(0)


def load() -> None:
    """PyTorch, before anything is forked."""
    gc.disable()
    import torch  # noqa: F401

    gc.enable()
    gc.freeze()  # a collection would walk through a million objects, and copy the pages that programs share


def draw_own_numbers() -> None:
    """Each process begins with a seed of its own, which those that are forked have in common; Python itself gives its own anew."""
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _run(words: list[str], output: int) -> int:
    """The script's status."""
    os.setsid()
    ctypes.CDLL(None).prctl(SET_NAME, os.path.basename(words[3]).encode(errors="surrogateescape"), 0, 0, 0)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
    folder, os.environ[environment.VARIABLE], os.environ["PATH"], *sys.argv[:] = words
    os.chdir(folder)
    draw_own_numbers()
    as_if_not_imported("torch")
    try:
        _run_script(sys.argv[0])
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        with contextlib.suppress(Exception):
            sys.stdout.flush()  # before the error, as Python does
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return 1
    return 0


def _run_script(path: str) -> None:
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__file__=path, __builtins__=__builtins__, __loader__=SourceFileLoader("__main__", path))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def as_if_not_imported(*packages: str) -> None:
    """Their modules are put aside until the script imports PyTorch; then `sitecustomize` turns virtual GPUs on."""
    spec = importlib.util.spec_from_file_location("virtualgpu_site", os.path.join(SITE, "sitecustomize.py"))
    assert spec is not None and spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    names = [name for name in sys.modules if name.partition(".")[0] in packages]
    sys.meta_path[:0] = [site._Finder(), _Loaded({name: sys.modules.pop(name) for name in names})]


class _Loaded:
    """Finds PyTorch where it was put aside, once."""

    def __init__(self, modules: dict[str, types.ModuleType]):
        self._modules = modules

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "torch" else None

    def create_module(self, spec):
        self._spec = self._modules["torch"].__spec__
        return self._modules["torch"]

    def exec_module(self, torch) -> None:
        torch.__spec__ = self._spec
        ours_too = environment.__package__ not in sys.modules  # else the script has imported it anew
        for name, module in self._modules.items():
            if ours_too or name.partition(".")[0] == "torch":
                sys.modules[name] = module
        sys.meta_path.remove(self)
