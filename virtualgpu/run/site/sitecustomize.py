"""Virtual GPUs are on as soon as `import torch` is done, in every Python process that the runner's program starts.

Python imports a `sitecustomize` at its start; the runner puts this folder first on PYTHONPATH. A process that never imports
torch pays for one finder, which looks each imported name up in a table. When done, this module steps aside: the folder leaves
sys.path, and a sitecustomize that it hid (Debian, Kaggle, coverage and others have one) runs as it would have.
"""

import gc
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))


class _Finder:
    """Finds `virtualgpu` wherever the program runs, and acts when the module asked for has run."""

    def find_spec(self, name, path=None, target=None):
        if name == "virtualgpu":
            from importlib.util import spec_from_file_location

            return spec_from_file_location(
                name, os.path.join(_PACKAGE, "__init__.py"), submodule_search_locations=[_PACKAGE]
            )
        how = _EXECUTED.get(name if name == "torch" else name.rpartition(".")[2])
        if how is None or (how is _start and name != "torch") or (how is _answer and not os.environ.get("VIRTUALGPU")):
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    _change(spec.loader, how)
                return spec
        return None


def _change(loader, how):
    """The loader stays what it is (others ask it for source and data); only its next execution is `how(execute, module)`."""
    execute = loader.exec_module

    def exec_module(module):
        del loader.exec_module
        how(execute, module)

    loader.exec_module = exec_module


def _set_aside(execute, torch):
    """PyTorch's million objects stay for good, so Python's collections need not walk through them: not while torch is imported, not
    when an optimizer imports as much again, not at the end. It is a fifth of what a process takes to start and to end.

    What is garbage before goes before. Triton's bindings must be taken apart at the end, or they print; torch does not bring them.
    """
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        execute(torch)
        if "triton" not in sys.modules:
            gc.freeze()
    finally:
        if collects:
            gc.enable()


def _start(execute, torch):
    """Modules of ours whose import led to torch's are half imported now. They are imported anew here, as a whole; when Python comes
    to the end of the first attempt, it takes what it finds in sys.modules."""
    _set_aside(execute, torch)
    unfinished = [
        name for name, module in list(sys.modules.items()) if name.startswith("virtualgpu.") and _begun(module)
    ]
    aside = {name: sys.modules.pop(name) for name in unfinished}
    try:
        from virtualgpu.run import child

        child.start()
    finally:
        for name, module in aside.items():
            sys.modules.setdefault(name, module)


def _begun(module):
    return getattr(getattr(module, "__spec__", None), "_initializing", False)


def _answer(execute, nvml):
    """A copy of NVIDIA's Python library for NVML: whatever it asks the driver, it asks us."""
    execute(nvml)
    if hasattr(nvml, "_nvmlGetFunctionPointer") and hasattr(nvml, "nvmlLib"):
        nvml.nvmlLib = _Later(nvml)


class _Later:
    """Stands where the driver's library would be, until the first question."""

    def __init__(self, nvml):
        self._nvml = nvml

    def __getattr__(self, name):
        from virtualgpu.torch_api.nvml import of_the_runner

        self._nvml.nvmlLib = library = of_the_runner()
        return getattr(library, name)


# Ray and others bring copies of pynvml under names of their own; older ones keep the library in a module called nvml.
_EXECUTED = {"torch": _start, "pynvml": _answer, "nvml": _answer, "py3nvml": _answer}


def _next_sitecustomize():
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":  # run/prefork.py takes the finder alone
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    if os.environ.get("VIRTUALGPU"):
        sys.meta_path.insert(0, _Finder())
    _next_sitecustomize()
