"""PyTorch's private names behave as the engine expects of them, in whichever version is installed."""

import ast
import gc
import importlib.util
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import virtualgpu
from tests import forks
from virtualgpu import _compat
from virtualgpu.timing import flops

aten = torch.ops.aten
ENGINE = Path(virtualgpu.__file__).parent
CPU, META, ONE = torch.device("cpu"), torch.device("meta"), torch.device("cuda:1")


class Listener(TorchDispatchMode):
    """Notes every operation: (operation, types, args, kwargs), and what `ask` says meanwhile."""

    def __init__(self, ask=lambda: None):
        super().__init__()
        self.heard, self.ask, self.answers = [], ask, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.heard.append((func, types, args, kwargs or {}))
        self.answers.append(self.ask())
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [func._schema.name.removeprefix("aten::") for func, *_ in self.heard]


# -- names that say something of a tensor, an operation or this version: each with what it says


def hooks_of_gradients() -> list:
    x, y, z = (torch.ones(2, requires_grad=True) for _ in range(3))
    y.register_hook(lambda gradient: None)
    z.register_post_accumulate_grad_hook(lambda tensor: None)
    return [_compat.has_hooks(tensor) for tensor in (x, y, z, torch.ones(2))]


def devices_behind() -> list:
    x = torch.ones(2, device=ONE)
    with virtualgpu.dry_run():
        dry = torch.ones(2, device=ONE)
        found = [dry.is_meta, _compat.is_really_meta(dry), _compat.real_device(dry)]
    return [x.device, _compat.real_device(x), _compat.real_storage_device(x.untyped_storage()), *found]


def modes() -> list:
    fake = Listener(_compat.fake_mode_is_on)
    with FakeTensorMode(), fake:
        torch.ones(2)
    with torch.device("meta"):
        inside = _compat.default_device()
    return [_compat.fake_mode_is_on(), *fake.answers, inside, _compat.default_device()]


def stood_in_for() -> list:
    def ours(*args):
        return torch.zeros(*args)

    before, undo = _compat.builtin_name(ours), _compat.register_as_builtin(ours, "aten::ones")
    during = _compat.builtin_name(ours)
    undo()
    return [_compat.builtin_name(torch.ones), before, during, _compat.builtin_name(ours)]


def keys() -> list:
    key, mine, excluded = (
        _compat.DispatchKey.AutocastCUDA,
        _compat.DispatchKey.AutocastPrivateUse1,
        torch._C._dispatch_tls_is_dispatch_key_excluded,
    )
    below, before = _compat.keys_below(key), excluded(mine)
    with _compat.without_keys(_compat.KeySet(mine)):
        found = [_compat.has_fallback(key), below.has(key), below.has(_compat.DispatchKey.CPU), excluded(mine)]
    _compat.exclude_key(mine, not before)
    found.append(excluded(mine) is not before)
    _compat.exclude_key(mine, before)
    return found


def preferred_blas() -> list:
    before = _compat.preferred_blas()
    _compat.prefer_blas(_compat.CUBLASLT)
    found = [_compat.preferred_blas() == _compat.CUBLASLT != before]
    _compat.prefer_blas(before)
    return found


def allowed_tf32() -> list:
    products, found = torch.backends.cuda.matmul, []
    before = products.allow_tf32
    for allowed in (not before, before):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
            found += [_compat.in_tf32("conv") is allowed, _compat.in_tf32("rnn") is allowed]
        products.allow_tf32 = allowed
        found.append(_compat.in_tf32("matmul") is allowed)
    return found


def flops_of_products() -> set:
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    rows = [
        (aten.mm.default, (a, b)),
        (aten.mm.dtype, (a, b, torch.float32)),
        (aten.addmm.dtype, (torch.ones(4), a, b, torch.float32)),
        (aten.bmm.dtype, (a[None], b[None], torch.float32)),
        (aten.baddbmm.dtype, (torch.ones(4), a[None], b[None], torch.float32)),
    ]
    return {_compat.flop_formula(operator)(*args, out_val=torch.ones(2, 4)) for operator, args in rows}


def workspaces() -> list:
    """How this version gives cuBLAS its workspaces."""
    graphs = (Path(torch.__file__).parent / "_inductor" / "cudagraph_trees.py").read_text("utf-8")
    return [
        ("TORCH_CUBLAS_WORKSPACE_CACHE=1 keeps persistent workspaces" not in graphs) == _compat.KEEPS_WORKSPACES,
        hasattr(torch.backends.cuda, "cublas_workspace_size") == _compat.SETS_WORKSPACES,
        9 in _compat.LARGE_WORKSPACES and 8 not in _compat.LARGE_WORKSPACES,
        _compat.KEEPS_WORKSPACES or not _compat.LT_HAS_ITS_OWN,
    ]


ROWS = [
    (hooks_of_gradients, [False, True, True, False]),
    (devices_behind, [ONE, CPU, CPU, False, True, META]),
    (modes, [False, True, META, None]),
    (stood_in_for, ["aten::ones", None, "aten::ones", None]),
    (keys, [True, False, True, True, True]),
    (preferred_blas, [True]),
    (allowed_tf32, [True] * 6),
    (flops_of_products, {2 * 2 * 3 * 4}),
    (workspaces, [True] * 4),
    (lambda: _compat.flop_formula(aten.add.Tensor), None),
    (lambda: _compat.parse_to("cuda:1", torch.float16, non_blocking=True), (ONE, torch.float16, True, None)),
    (lambda: _compat.parse_to(torch.int8)[:2], (None, torch.int8)),
    (lambda: _compat.empty((2, 3), device="meta").shape, (2, 3)),
    (lambda: _compat.empty_strided((2, 3), (1, 2), device="meta").stride(), (1, 2)),
    (lambda: _compat.empty_like(torch.ones(2), device="meta").is_meta, True),
    (lambda: [_compat.is_composite(op) for op in (aten.matmul.default, aten.mm.default)], [True, False]),
    (lambda: [_compat.has_kernel(f"aten::{name}", "AutocastCUDA") for name in ("mm", "relu")], [True, False]),
    (lambda: [f"aten::{n}" in _compat.registrations("AutocastCUDA") for n in ("mm", "relu")], [True, False]),
    (lambda: [_compat.guard_without_driver() for _ in range(2)] and torch.ones(2).sum().item(), 2),  # it may be set twice
    (lambda: [callable(fetcher.fetch) for fetcher in _compat.fetchers()], [True, True]),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "expected"), ROWS)
def test_what_a_private_name_says(gpus, ask, expected):
    assert ask() == expected


# -- what a dispatch mode is told


def test_numbers_arrive_as_a_copy_from_the_cpu():
    before = _compat.lifts_only_cpu_tensors()  # others turn it on, too
    virtualgpu.gpus(2)
    with Listener() as listener:
        torch.tensor([1.0, 2.0], device="cuda:1")
    copies = [
        (args[0].is_cuda, kwargs["device"]) for func, _, args, kwargs in listener.heard if "_to_copy" in str(func)
    ]
    assert copies == [(False, ONE)]
    assert _compat.lifts_only_cpu_tensors() is True
    virtualgpu.reset()
    assert _compat.lifts_only_cpu_tensors() is before


# -- operations, registrations, files


def test_an_operator_of_higher_order_without_a_kernel_is_named():
    class Nothing(_compat.HigherOrderOperator):
        def __call__(self):
            """It has no kernel."""

    with pytest.raises(NotImplementedError, match="virtualgpu_test_of_none is not modelled"):
        _compat.implementation(Nothing("virtualgpu_test_of_none"))


def test_costs_where_a_version_lacks_an_operation(monkeypatch):
    class Lacking:
        def __getattr__(self, name):
            if name == "mkldnn_rnn_layer":
                raise AttributeError(name)
            return getattr(aten, name)

    monkeypatch.setattr(torch.ops, "aten", Lacking())
    spec = importlib.util.spec_from_file_location("costs_there", flops.__file__)
    there = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(there)
    assert flops.FORMULAS.keys() - there.FORMULAS.keys() == {aten.mkldnn_rnn_layer}


def test_torch_library_keeps_account_of_what_python_registers():
    library = torch.library.Library("virtualgpu_compat", "FRAGMENT")
    library.define("own(Tensor x) -> Tensor")
    for key in ("CPU", "CUDA", "CompositeExplicitAutograd"):
        library.impl("own", lambda x: x + 1, key)
        assert f"virtualgpu_compat/own/{key}" in _compat.registered_in_python()
        kernel = getattr(_compat.DispatchKey, key)
        assert torch.ops.virtualgpu_compat.own.default._op_dk(kernel, torch.zeros(1)).item() == 1
    library._destroy()
    assert "virtualgpu_compat/own/CPU" not in _compat.registered_in_python()


def test_storages_are_as_before(gpus):
    Storage = torch.UntypedStorage
    assert Storage(4, device="cuda:1").device == ONE
    virtualgpu.reset()
    before = dict(vars(Storage)), Storage.__new__, len(_compat.saving)
    for _ in range(3):
        virtualgpu.gpus(1)
        assert len(_compat.saving) == before[2] + 1
        virtualgpu.reset()
    assert (dict(vars(Storage)), Storage.__new__, len(_compat.saving)) == before
    assert "__new__" not in vars(Storage) and Storage(4).nbytes() == 4
    assert type("Mine", (Storage,), {})(4).nbytes() == 4
    gc.collect()
    with pytest.raises(TypeError):
        Storage(4, nothing=1)


def test_a_subscript_is_known_by_its_instruction(gpus):
    """x[[0, 1]] = 0 may have its index on the CPU, and index_fill_ not, however often Python has specialised the line."""
    x, index = torch.ones(3, device="cuda"), [0, 1]
    for number in range(100):
        x[index] = number
        with pytest.raises(RuntimeError, match="same device"):
            x.index_fill_(0, torch.tensor(index), 0)
    x[[2]] += 6
    assert x.tolist() == [99, 99, 7]


# -- in a process of its own


@pytest.mark.parametrize(
    "code",
    [
        # who listens to PyTorch's own detector of races once listens for ever
        "from virtualgpu import _compat; assert not _compat.gpu_trace_has_listeners(); import torch.cuda._sanitizer; "
        "assert _compat.gpu_trace_has_listeners()",
        # a newer version that has all names works
        "import torch; torch.__version__ = '2.16.0'; import virtualgpu; virtualgpu.gpus(1); torch.ones(1, device='cuda')",
    ],
    ids=["gpu_trace", "newer"],
)
def test_in_a_process_of_its_own(code):
    done = forks.run("-c", code)
    assert done.returncode == 0, done.stderr


# -- versions that are not supported: one sentence, with both

OTHER = {"2.10.1": "is older", "2.16.0": "lacks what they use of it"}
INSTALLED = any(entry.value == "virtualgpu.pytest_plugin" for entry in entry_points(group="pytest11"))
PLUGIN = [] if INSTALLED else ["-p", "virtualgpu.pytest_plugin"]
ENTRANCES = {
    "gpus": ["-c", "import torch, virtualgpu; virtualgpu.gpus()"],
    "runner": ["-m", "virtualgpu", "-c", "import torch"],
    "plugin": ["-m", "pytest", "-q", "--virtual-gpus", "1", *PLUGIN, "tests.py"],
    "marker": ["-m", "pytest", "-q", *PLUGIN, "tests.py"],
}
MARKED = "import pytest, torch\n@pytest.mark.virtual_gpus(1)\ndef test_it(): pass\n"


def said(folder: Path, arguments: list[str], version: str, wrong: str) -> str:
    """By a Python that has only what lies in that folder, and the engine: the sentence is in it."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ENGINE.parent)])}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode, done.stdout
    text = done.stdout + done.stderr
    of = rf"virtual GPUs work with PyTorch 2\.11 to 2\.15, and {re.escape(version)}, which is installed, {wrong}"
    assert re.search(of + r".*: pip install 'torch>=2\.11,<2\.16'", text), text
    return text


@pytest.mark.parametrize("version", OTHER)
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_an_unsupported_version_is_named(entrance, version, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"__version__ = {version!r}")
    (tmp_path / "tests.py").write_text(MARKED)
    text = said(tmp_path, ENTRANCES[entrance], version, OTHER[version])
    assert entrance == "gpus" or "Traceback" not in text


@pytest.mark.parametrize("name", ["_get_sdp_priority_order", "_group_tensors_by_device_and_dtype"])
def test_a_private_name_that_is_gone_is_named(name, tmp_path):
    code = f"import torch, virtualgpu; del torch._C.{name}; virtualgpu.gpus()"
    said(tmp_path, ["-c", code], torch.__version__, f".*{name}")


# -- no other file of the engine spells a private name of PyTorch

OF_PYTHON = {"_asdict", "_config", "_exit", "_fields", "_getframe", "_initializing", "_obj", "_replace", "_WorkItem"}
OF_TRITON = {"_bench", "_init_args_hst", "_restore_args_dev"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and not name.startswith("_virtual")  # marks of ours


def names_of(tree: ast.Module) -> set[str]:
    """What a file defines itself: functions, classes, variables, and attributes of its own objects."""
    return {
        name
        for node in ast.walk(tree)
        for name in (
            getattr(node, "name", None),
            node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None,
            node.attr if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" else None,
        )
        if name is not None
    }


def spelled(tree: ast.Module, own: set[str]) -> list[str]:
    """The private names of PyTorch in a file. Operators (torch.ops.aten) are public, whatever their names; so is what a class overrides."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if re.match(r"torch\b.*\._", name.name)]
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "torch":
                found += [name.name for name in names if re.search(r"\._", f"{module}.{name.name}")]
            case ast.Attribute(attr=attr) if is_private(attr):
                path = ast.unparse(node)
                operator = path.startswith(("aten.", "torch.ops."))
                if not operator and (path.startswith("torch.") or attr not in own):
                    found.append(path)
            case ast.Constant(value=str(text)) if re.fullmatch(r"torch(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*", text):
                found.append(text)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]) if is_private(name):
                if name not in own:
                    found.append(name)
    return found


def test_no_other_file_spells_a_private_name():
    files = [path for path in ENGINE.rglob("*.py") if path.parent != ENGINE / "_compat"]
    trees = {path: ast.parse(path.read_text("utf-8")) for path in files}
    own = OF_PYTHON | OF_TRITON.union(*map(names_of, trees.values()))
    assert {str(path.relative_to(ENGINE)): names for path, tree in trees.items() if (names := spelled(tree, own))} == {}
