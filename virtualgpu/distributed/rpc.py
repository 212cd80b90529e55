"""torch.distributed.rpc with virtual GPUs on: what a thread of TensorPipe computes, and tensors that a device map sends to another GPU.

TensorPipe's threads are C++'s, and so are those in which distributed autograd works: each of its pool meets the virtual GPUs once, when
RPC begins. C++ takes a virtual GPU's tensors for the CPU's, so that it has no device maps to follow: a tensor of a GPU travels as its copy
on the CPU, with a word about the GPU that it goes to, and its gradient comes back the same way. TensorPipe's channels for tensors of
GPUs are left out: where a real one is hidden, one of them ends in an error.
"""

import functools
import threading

import torch

from virtualgpu import _compat
from virtualgpu._compat.distributed import rpc_internal, rpc_reducers, rpc_worker
from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.imports import when_imported
from virtualgpu.torch_api.registry import Patches

CHANNELS = ["mpt_uv", "basic"]  # TensorPipe's for the CPU, on every system
SECONDS = 30  # for all threads of a pool to come
NO_MAP = (
    "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before sending them over RPC, or call "
    "`set_device_map` on `TensorPipeRpcBackendOptions` to explicitly configure device mapping. {} device mapping is not available for "
    "{}, but found tensor on device: {}"
)


def install(machine: Machine, patches: Patches) -> None:
    """Stand-ins in torch.distributed.rpc, where PyTorch has it."""
    if torch.distributed.rpc.is_available():
        when_imported(
            "torch.distributed.rpc.options",
            lambda module: patches.stand_in(module.TensorPipeRpcBackendOptions, "__init__", _options),
            patches,
        )
        when_imported("torch.distributed.rpc.api", lambda api: Rpc(machine, api).install(patches), patches)


class Rpc:
    """What one process knows of its agent: its name, the device maps of its own and who has one to it."""

    current: "Rpc | None" = None  # the latest: functions that other processes name find it here

    def __init__(self, machine: Machine, api):
        self.machine, self.api = machine, api
        self.name, self.maps, self.reverse, self.threads = "", {}, {}, 0
        self.met: threading.Barrier | None = None  # of the pool's threads
        self.now = 0.0  # the host's time at the end of the latest call from outside
        self.to = threading.local()  # .name: the worker to whom this thread is about to send

    def install(self, patches: Patches) -> None:
        """Replace what sends, what receives, and what begins it all."""
        api, rpc, internal = self.api, torch.distributed.rpc, rpc_internal()
        table = rpc_reducers()
        reducer = table[torch.Tensor]
        table[torch.Tensor] = functools.partial(self.reduce, reducer)
        patches.undo(lambda: table.update({torch.Tensor: reducer}))
        patches.replace(rpc.TensorPipeAgent, "_get_device_map", lambda agent, worker: self.maps.get(worker.name, {}))
        for owner, name, function in (
            (internal, "_run_function", self.run_function),
            (rpc, "TensorPipeAgent", self.make_agent),
            (rpc.PyRRef, "to_here", self.to_here),
            (api, "_init_rpc_states", self.init_rpc_states),
            (api, "_invoke_rpc", self.invoke),
        ):
            patches.stand_in(owner, name, function)
        patches.stand_in_everywhere(api, "remote", self.invoke)
        Rpc.current = self

    # -- the agent and its threads

    def make_agent(self, original, store, name, rank, world_size, options, reverse_device_maps, devices):
        """What makes the agent; device maps are ours to follow."""
        self.name, self.threads = name, options.num_worker_threads
        self.maps, self.reverse = dict(options.device_maps), dict(reverse_device_maps)
        if not self.maps and not devices:
            return original(store, name, rank, world_size, options, reverse_device_maps, devices)
        if not world_size:
            raise NotImplementedError(
                "device maps in a group of RPC that workers may join and leave are not modelled on virtual GPUs: "
                "give rpc.init_rpc a world_size"
            )
        plain = type(options)(
            num_worker_threads=options.num_worker_threads,
            rpc_timeout=options.rpc_timeout,
            init_method=options.init_method,
        )
        return original(store, name, rank, world_size, plain, {}, [])

    def init_rpc_states(self, original, agent) -> None:
        """Once the agent is there, every thread of its pool meets the virtual GPUs: each waits in a call until all are in one."""
        original(agent)
        if self.machine.closed or not self.threads:
            return
        self.met = threading.Barrier(self.threads)
        calls = [self.api.rpc_async(self.name, _meet) for _ in range(self.threads)]
        for call in calls:
            call.wait()

    def enter(self) -> None:
        """The thread of C++ that is here sees the virtual GPUs; Python forgets it between two calls, C++ does not."""
        if not self.machine.closed and not _compat.has_mode(
            lambda mode: getattr(mode, "machine", None) is self.machine
        ):
            self.machine.enter()

    def run_function(self, original, python_udf):
        """What C++ calls for a call from outside."""
        if self.machine.closed:
            return original(python_udf)
        self.enter()
        self.machine.clock.inherit(self.now)
        try:
            return original(python_udf)
        finally:
            self.now = max(self.now, self.machine.clock.host)

    # -- what travels

    def invoke(self, original, to, func, *args, **kwargs):
        """api.remote, and what rpc_sync and rpc_async call: PyTorch's own operations are sent as Python is, which knows of GPUs."""
        if self.machine.closed or not callable(func):
            return original(to, func, *args, **kwargs)
        if isinstance(func, torch.jit.ScriptFunction):
            _refuse_scripted(func, [*args, *kwargs.values()])
        elif _compat.builtin_name(func) is not None:
            func = Builtin(func)
        before = getattr(self.to, "name", None)
        self.to.name = rpc_worker(to).name
        try:
            return original(to, func, *args, **kwargs)
        finally:
            self.to.name = before

    def reduce(self, original, tensor):
        """How a tensor is pickled: a GPU's as its copy, and where it goes. Raises RuntimeError where no device map says so."""
        if self.machine.closed:
            return original(tensor)
        here, to = tensor.device, getattr(self.to, "name", None)
        sender, target = None, here
        if to is not None:
            target = self.maps.get(to, {}).get(here, None if here.type == "cuda" else here)
            if target is None:
                raise RuntimeError(NO_MAP.format("Request", f"destination {to}", here))
        elif here.type == "cuda":  # an answer: who has asked knows the map, and this worker that there is one
            sender = self.name
            if not any(here in devices for devices in self.reverse.values()):
                raise RuntimeError(NO_MAP.format("Response", "the caller", here))
        if here.type != "cuda" and target == here:
            return original(tensor)
        return (_receive, (*original(tensor.cpu()), sender, target))

    def to_here(self, original, rref, *args, **kwargs):
        """RRef.to_here: C++ fetches a tensor without its label, so its owner is asked where it is."""
        value = original(rref, *args, **kwargs)
        is_plain = self.machine.closed or not isinstance(value, torch.Tensor) or rref.is_owner()
        if is_plain or gpu_of(value) is not None:
            return value
        device = self.api.rpc_sync(rref.owner(), _where, args=(rref,))
        return value if device.type == "cpu" else self.received(value, rref.owner_name(), device)

    def received(self, tensor, sender, device):
        """A tensor that has come as a copy, on its GPU. sender: who answers, with a tensor on a GPU of its own; None: who asks."""
        self.enter()
        if sender is not None:
            devices = {there: here for here, there in self.maps.get(sender, {}).items()}
            if device not in devices:
                raise RuntimeError(NO_MAP.format("Response", sender, device))
            device = devices[device]
        gpu = self.machine.gpu(device)
        if gpu is not None:  # not a copy: distributed autograd is still to set where this very tensor has come from
            self.machine.place(tensor, gpu)
            self.machine.charge_copy(None, gpu, tensor.nbytes)
        return tensor


class Builtin:
    """An operation of PyTorch as a function of Python."""

    def __init__(self, func):
        self.func, self.__name__ = func, getattr(func, "__name__", "builtin")

    def __call__(self, *args, **kwargs):
        """The operation's result."""
        return self.func(*args, **kwargs)


def _options(original, options, *, _channels=None, **kwargs) -> None:
    """What makes an agent's options. TensorPipe asks the driver for its GPUs, and CUDA's runtime, which finds none where they are hidden."""
    original(options, _channels=CHANNELS if _channels is None else _channels, **kwargs)


def _receive(receiver, place, sender, device):
    """Unpickles a tensor of a GPU."""
    return Rpc.current.received(receiver(*place), sender, device)


def _where(rref) -> torch.device:
    """What the owner of a tensor is asked for."""
    return rref.local_value().device


def _meet() -> None:
    """What each thread of the pool is called for once."""
    Rpc.current.met.wait(SECONDS)


def _refuse_scripted(func, values) -> None:
    for value in values:
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor) and gpu_of(tensor) is not None:
                raise NotImplementedError(
                    f"a function of TorchScript ({func.name}) with tensors on GPUs is not modelled over RPC on virtual GPUs: "
                    "send the function of Python that it was made from"
                )
