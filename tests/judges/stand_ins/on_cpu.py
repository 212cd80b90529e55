"""The reference that a program on virtual GPUs is compared with: the same program, its "GPUs" this CPU, its NCCL gloo, without virtualgpu.

`start(n)`: what asks for CUDA gets the CPU. Random numbers "on a GPU" come from a generator of their own, as on GPUs, if the call tells that
it is meant for one (a factory with `device=`, dropout). What CUDA counts (bytes, time) is 0. Enough for programs that train; no more.
"""

import collections
import functools
import os
import time
import types

import torch
import torch.distributed as dist
from torch.distributed.nn import functional as with_gradients
from torch.overrides import TorchFunctionMode

_RANDOM = {"rand", "randn", "randint", "randperm", "normal"}
_IN_PLACE = {
    "normal_",
    "uniform_",
    "trunc_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "xavier_uniform_",
    "xavier_normal_",
}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "multinomial"}  # of a model, on a GPU
if os.environ.get("LABS_DROPOUT") == "cpu":  # a program whose model stays on the CPU
    _DROPOUTS = set()


def _is_gpu(value):
    if isinstance(value, str):
        return value.split(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


def _here(value):
    return "cpu" if isinstance(value, str) and _is_gpu(value) else torch.device("cpu") if _is_gpu(value) else value


def _has_storage(value):
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta and value.layout == torch.strided


class _OnCpu(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.generator, self.on_gpu = torch.Generator(), set()  # and where tensors lie that were made "on a GPU"
        self.generator.manual_seed(torch.initial_seed())

    def __torch_function__(self, function, kinds, arguments=(), options=None):
        options = dict(options or {})
        if function is torch.device:
            return function(*arguments, **options)
        on_gpu = _is_gpu(options.get("device"))
        on_gpu = on_gpu or (
            function is torch.Tensor.to and any(_is_gpu(each) or type(each) is int for each in arguments[1:])
        )
        if function is torch.Tensor.to and len(arguments) > 1 and type(arguments[1]) is int:
            arguments = (arguments[0], "cpu", *arguments[2:])
        if "device" in options:
            options["device"] = "cpu" if type(options["device"]) is int else _here(options["device"])
        arguments = tuple(map(_here, arguments))
        options.pop("pin_memory", None)
        name = function.__name__
        if (
            (on_gpu and name in _RANDOM)
            or name in _DROPOUTS
            or (name in _IN_PLACE and self._lies_on_gpu(arguments, options))
        ):
            result = self._drawn(function, arguments, options)
        else:
            result = function(*arguments, **options)
        if on_gpu and _has_storage(result):
            self.on_gpu.add(result.untyped_storage().data_ptr())
        return result

    def _lies_on_gpu(self, arguments, options):
        tensor = arguments[0] if arguments else options.get("tensor")
        return (
            _has_storage(tensor) and not options.get("generator") and tensor.untyped_storage().data_ptr() in self.on_gpu
        )

    def _drawn(self, function, arguments, options):
        ours = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            return function(*arguments, **options)
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(ours)


class _Event:
    def __init__(self, *_, **__):
        self.at = 0.0

    def record(self, *_):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return (other.at - self.at) * 1000

    def query(self):
        return True

    def synchronize(self, *_):
        pass

    wait = synchronize


class _Stream:
    device, cuda_stream, priority = torch.device("cpu"), 0, 0

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_stream(self, *_):
        pass

    wait_event = synchronize = wait_stream

    def is_capturing(self):
        return False

    def record_event(self, event=None):
        return event or _Event()


class _DataParallel(torch.nn.Module):
    """As the original splits: a share of the batch for each; statistics of batches are the first share's."""

    def __init__(self, module, device_ids=None, output_device=None, dim=0):
        super().__init__()
        self.module, self.shares = module, len(device_ids) if device_ids else torch.cuda.device_count()

    def forward(self, first, *others, **options):
        parts = list(zip(*(each.chunk(self.shares) for each in (first, *others)), strict=True))
        outputs = []
        for part in parts:
            outputs.append(self.module(*part, **options))
            if len(outputs) == 1:
                kept = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        for name, buffer in self.module.named_buffers():
            buffer.copy_(kept[name])
        return torch.cat(outputs)


class _SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Statistics of all ranks' batches; PyTorch's own has no kernel for the CPU."""

    def __init__(self, *arguments, process_group=None, **options):
        super().__init__(*arguments, **options)

    def _check_input_dim(self, x):
        pass

    def forward(self, x):
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(x)
        over, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
        count = torch.full((1,), float(x.numel() // x.size(1)))
        sums = torch.cat([x.float().sum(over), x.float().square().sum(over), count])
        sums = with_gradients.all_reduce(sums)
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        variance, many = square - mean.square(), sums[-1].detach()
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * many / (many - 1), self.momentum)
        y = (x - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
        return (
            y.to(x.dtype) if self.weight is None else (y * self.weight.view(shape) + self.bias.view(shape)).to(x.dtype)
        )

    @classmethod
    def convert_sync_batchnorm(cls, module, process_group=None):
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            new = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
            new.load_state_dict(module.state_dict())
            return new
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child))
        return module


def start(gpus):
    """From here on, `gpus` GPUs are this CPU."""
    cuda, mode = torch.cuda, _OnCpu()
    mode.__enter__()
    answers = {
        "is_available": True, "is_initialized": True, "device_count": gpus, "current_device": 0, "get_device_name": "CPU",
        "get_device_capability": (8, 0), "is_bf16_supported": True, "memory_stats": collections.defaultdict(int), "mem_get_info": (1 << 34, 1 << 34),
        "get_device_properties": types.SimpleNamespace(name="CPU", total_memory=1 << 34, major=8, minor=0, multi_processor_count=1),
        "memory_summary": "", "utilization": 0, "nccl_version": (2, 0, 0), "is_current_stream_capturing": False,
    }  # fmt: skip
    counts = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    answers |= dict.fromkeys(counts, 0)
    answers |= dict.fromkeys(("init", "set_device", "synchronize", "empty_cache", "ipc_collect", "set_stream"))
    answers |= dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"))
    for name, answer in answers.items():
        setattr(cuda, name, _answering(answer))
    for name in ("manual_seed", "manual_seed_all"):
        setattr(cuda, name, lambda seed: mode.generator.manual_seed(int(seed)) and None)
    seed_cpu = torch.manual_seed

    def manual_seed(seed):
        mode.generator.manual_seed(int(seed))
        return seed_cpu(seed)

    torch.manual_seed = torch.random.manual_seed = manual_seed
    for name in ("get_rng_state", "get_rng_state_all"):
        setattr(cuda, name, lambda *_: mode.generator.get_state())
    for name in ("set_rng_state", "set_rng_state_all"):
        setattr(cuda, name, lambda state, *_: mode.generator.set_state(state))
    cuda.Event, cuda.Stream = _Event, _Stream
    for name in ("current_stream", "default_stream", "stream", "device"):
        setattr(cuda, name, lambda *_: _Stream())
    accelerator = {
        "is_available": True,
        "device_count": gpus,
        "current_accelerator": torch.device("cpu"),
        "current_device_index": 0,
        "current_stream": _Stream(),
    }
    for name, answer in (accelerator | dict.fromkeys(("set_device_index", "synchronize", "empty_cache"))).items():
        setattr(torch.accelerator, name, _answering(answer))
    torch.Tensor.cuda, torch.Tensor.pin_memory = lambda self, *_, **__: self, lambda self, *_: self
    torch.Tensor.record_stream, torch.nn.Module.cuda = _answering(None), lambda self, *_: self
    to = torch.nn.Module.to

    def moved(self, *arguments, **options):
        arguments = ["cpu" if type(each) is int else _here(each) for each in arguments]
        return to(self, *arguments, **{name: "cpu" if type(v) is int else _here(v) for name, v in options.items()})

    torch.nn.Module.to = moved
    torch.nn.SyncBatchNorm = _SyncBatchNorm
    torch.nn.DataParallel = torch.nn.parallel.DataParallel = _DataParallel
    torch.autocast = torch.amp.autocast = torch.amp.autocast_mode.autocast = _autocast(torch.autocast)
    scaler = torch.amp.GradScaler
    torch.amp.GradScaler = lambda device="cpu", *a, **o: scaler("cpu", *a, **o)
    cuda.amp.GradScaler = functools.partial(scaler, "cpu")
    cuda.amp.autocast = lambda enabled=True, dtype=torch.float16, cache_enabled=True: torch.autocast(
        "cpu", dtype, enabled
    )
    _load_here()
    _gloo()


def _answering(answer):
    """A function of its own: Dynamo wants no two names for one."""
    return lambda *_, **__: answer


def _autocast(autocast):
    class OnCpu(autocast):
        def __init__(self, device_type="cpu", dtype=None, enabled=True, cache_enabled=None):
            super().__init__("cpu", dtype or torch.float16, enabled, cache_enabled)

    return OnCpu


def _load_here():
    load = torch.load
    torch.load = lambda file, map_location=None, **options: load(file, "cpu", **options)


def _gloo():
    init, group, mesh, reduce = dist.init_process_group, dist.new_group, dist.init_device_mesh, dist.all_reduce
    wrapper = torch.nn.parallel.DistributedDataParallel

    def init_process_group(backend=None, *arguments, device_id=None, **options):
        return init("gloo", *arguments, **options)

    def new_group(ranks=None, timeout=None, backend=None, **options):
        options.pop("device_id", None)
        return group(ranks, timeout, None, **options)

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if op != dist.ReduceOp.AVG:
            return reduce(tensor, op, group, async_op)
        reduce(tensor, dist.ReduceOp.SUM, group)
        tensor.div_(dist.get_world_size(group))
        return types.SimpleNamespace(wait=lambda: None) if async_op else None

    class OnCpu(wrapper):
        def __init__(self, module, device_ids=None, output_device=None, **options):
            super().__init__(module, **options)

    OnCpu.__name__ = wrapper.__name__
    for place in (torch.nn.parallel, torch.nn.parallel.distributed):
        place.DistributedDataParallel = OnCpu
    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    dist.new_group, dist.all_reduce = new_group, all_reduce
    dist.init_device_mesh = dist.device_mesh.init_device_mesh = lambda device_type, *a, **o: mesh("cpu", *a, **o)
