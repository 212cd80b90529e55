"""Virtual GPUs are on as soon as `import torch` is done, in every Python process that the runner's program starts.

Python imports a `sitecustomize` at its start; the runner puts this folder first on PYTHONPATH. A process that never imports
torch pays for one finder, which looks each imported name up in a table. When done, this module steps aside: the folder leaves
sys.path, and a sitecustomize that it hid (Debian, Kaggle, coverage and others have one) runs as it would have.
"""

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
        if _needs_torch(name) and "torch" not in sys.modules:
            import torch  # noqa: F401  # and with it ours: it must not find them half imported

            if name in sys.modules:
                from importlib.util import spec_from_loader

                return spec_from_loader(name, _Loaded(sys.modules[name]))
        then = _AFTER.get(name if name == "torch" else name.rpartition(".")[2])
        if then is None or (then is _start and name != "torch"):
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    _and_then(spec.loader, then)
                return spec
        return None


def _needs_torch(name):
    return name.startswith("virtualgpu.") and not name.startswith("virtualgpu.run") and name not in _WITHOUT_TORCH


class _Loaded:
    """For an import that came to its end while it was being prepared."""

    def __init__(self, module):
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec):
        return self._module

    def exec_module(self, module):
        module.__spec__ = self._spec


def _and_then(loader, then):
    """The loader stays what it is (others ask it for source and data); only its next execution has a sequel."""
    execute = loader.exec_module

    def exec_module(module):
        del loader.exec_module
        execute(module)
        then(module)

    loader.exec_module = exec_module


def _start(torch):
    from virtualgpu.run import child

    child.start()


def _answer(nvml):
    """A copy of NVIDIA's Python library for NVML: whatever it asks the driver, it asks us."""
    if hasattr(nvml, "_nvmlGetFunctionPointer") and hasattr(nvml, "nvmlLib"):
        nvml.nvmlLib = _Later(nvml)


class _Later:
    """Stands where the driver's library would be, until the first question."""

    def __init__(self, nvml):
        self._nvml = nvml

    def __getattr__(self, name):
        from virtualgpu.patches import nvml

        self._nvml.nvmlLib = library = nvml.of_the_runner()
        return getattr(library, name)


# Of our own modules, those that do not import torch (and `virtualgpu.run`).
_WITHOUT_TORCH = {
    f"virtualgpu.{name}"
    for name in [
        "__main__",
        "environment",
        "hardware",
        "memory",
        "memory.ledger",
        "patches",
        "patches.nvml",
        "pytest_plugin",
    ]
}
# Ray and others bring copies of pynvml under names of their own; older ones keep the library in a module called nvml.
_AFTER = {"torch": _start, "pynvml": _answer, "nvml": _answer, "py3nvml": _answer}


def _next_sitecustomize():
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
if os.environ.get("VIRTUALGPU"):
    sys.meta_path.insert(0, _Finder())
_next_sitecustomize()
