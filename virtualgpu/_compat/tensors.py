"""Tensors, storages and devices below what virtual GPUs put in their place, and the nodes of autograd."""

from operator import attrgetter, methodcaller

import torch
from torch.utils import _pytree

_C = torch._C
Device = torch.device  # torch_api/devices.py may put another in its place
TensorBase = _C.TensorBase  # where Tensor has its attributes from
fake_tensor = torch._subclasses.fake_tensor
tree_leaves, tree_map_only = _pytree.tree_leaves, _pytree.tree_map_only

real_device = TensorBase.device.__get__  # (tensor) -> where its bytes really are
real_storage_device = torch.UntypedStorage.device.__get__
untyped = attrgetter("_untyped_storage")  # (TypedStorage) -> what it is made of
address = attrgetter("_cdata")  # of the C++ object behind a tensor, a storage or a generator
is_view = methodcaller("_is_view")  # (tensor)

is_functorch_wrapped = _C._functorch.is_functorch_wrapped_tensor
is_batched_gradient = _C._functorch.is_legacy_batchedtensor  # of autograd.grad(is_grads_batched=True)
functorch_unwrap = _C._functorch.get_unwrapped

empty = _C._VariableFunctions.empty
empty_like = _C._VariableFunctions.empty_like
empty_strided = _C._VariableFunctions.empty_strided
parse_to = _C._nn._parse_to  # (*args, **kwargs) of Tensor.to -> (device, dtype, non_blocking, memory_format)
suggest_memory_format = torch._prims_common.suggest_memory_format  # (tensor) -> the layout that its strides have

MAKE_GRADS = "_make_grads"  # of torch.autograd: (outputs, their gradients, ...), before C++ begins
graph_task = _C._current_graph_task_id  # () -> int; -1 outside a backward pass
current_node = _C._current_autograd_node  # () -> the node of the graph that is being run, or None
PythonNode = _C._FunctionBase  # of a torch.autograd.Function
next_sequence_number = _C._autograd._get_sequence_nr  # () -> the number that this thread's next node will have
sequence_number = methodcaller("_sequence_nr")  # (node)


def _past_overrides(getter):
    """`getter`, answered by C++ itself: where a TorchFunctionMode is on (torch.set_default_device, a mask of flex_attention) and for
    subclasses, PyTorch's getters ask Tensor's property of that name instead, which virtual GPUs replace."""
    plain, modes = (torch.Tensor, torch.nn.Parameter), _C._len_torch_function_stack

    def get(tensor: torch.Tensor) -> bool:
        if type(tensor) in plain and not modes():
            return getter(tensor)
        with _C.DisableTorchFunction():
            return getter(tensor)

    return get


is_really_meta = _past_overrides(TensorBase.is_meta.__get__)
is_really_on_gpu = _past_overrides(TensorBase.is_cuda.__get__)  # on a real one


def has_hooks(tensor: torch.Tensor) -> bool:
    """Does its gradient call somebody?"""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def in_forward_mode() -> bool:
    """Is torch.autograd.forward_ad.dual_level on? Any tensor may have a tangent then, also one that requires no gradient."""
    return torch.autograd.forward_ad._current_level >= 0


def coo_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The indices and the values of a sparse tensor, coalesced or not."""
    return [tensor._indices(), tensor._values()]


def numbers_are_gpus() -> bool:
    """Does C++ take torch.device(0) for cuda:0? Wheels without CUDA do not."""
    try:
        return Device(0).type == "cuda"
    except RuntimeError:  # no accelerator at all
        return False
