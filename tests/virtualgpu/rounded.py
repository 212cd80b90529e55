"""The CPU as virtual GPUs work with float16: products, convolutions, attention and sampled grids in float32, and the results rounded."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

NAMES = "grid_sampler_2d grid_sampler_3d mm addmm bmm baddbmm convolution convolution_backward _scaled_dot_product_flash_attention_for_cpu"
NAMES = {*NAMES.split(), "_scaled_dot_product_flash_attention_for_cpu_backward"}


class RoundedProducts(TorchDispatchMode):
    """with RoundedProducts(): forward and backward, of tensors on the CPU. calls: the operations that were carried out so."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._overloadpacket.__name__ not in NAMES or args[0].dtype is not torch.float16:
            return func(*args, **kwargs)
        self.calls.append(func)
        wide = tree_map_only(torch.Tensor, torch.Tensor.float, (args, kwargs))
        out = func(*wide[0], **wide[1])
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            return out[0].half(), out[1]  # the sums of exponentials are float32 anyway
        return tree_map_only(torch.Tensor, torch.Tensor.half, out)
