"""CUDA's words for what the CPU's kernels refuse: the name of the kernel, and the names of types on a GPU."""

import re

# {the CPU's name of a kernel in an error: CUDA's}, as an H100 said them (PyTorch 2.11, 2026-11-26)
KERNELS = {
    "log_softmax_lastdim_kernel_impl": "host_softmax",
    "log_softmax_kernel_impl": "host_softmax",
    "softmax_lastdim_kernel_impl": "host_softmax",
    "softmax_kernel_impl": "host_softmax",
    "add_stub": "ufunc_add_CUDA",
    "mse_cpu": "mse_cuda",
    "ctc_loss_cpu": "ctc_loss_cuda",
    "ctc_loss_meta": "ctc_loss_cuda",
    "bincount_cpu": "bincount_cuda",
    "normal_kernel_cpu": "normal_kernel_cuda",
    "GeluKernelImpl": "GeluCUDAKernelImpl",
    "silu_cpu": "silu_cuda",
    "max_all": "max_all_cuda",
    "min_all": "min_all_cuda",
    "bitwise_and_cpu": "bitwise_and_cuda",
    "bitwise_or_cpu": "bitwise_or_cuda",
    "bitwise_xor_cpu": "bitwise_xor_cuda",
    "lshift_cpu": "lshift_cuda",
    "rshift_cpu": "rshift_cuda",
    "geqrf_cpu": "geqrf_cuda",
    "lu_cpu": "lu_factor_cusolver",
    "cholesky_cpu": "cholesky_cusolver",
    "linalg_svd_cpu": "svd_cuda_gesvdjBatched",
    "upsample_nearest2d_channels_last": "upsample_nearest2d_out_frame",
    "adaptive_avg_pool2d": "adaptive_avg_pool2d_cuda",
    "im2col_out_cpu": "im2col_out_cuda",
    "lerp_kernel_scalar": "lerp_cuda",
    "kthvalue_cpu": "kthvalue_cuda",
}
KERNEL = re.compile(r'^"(\w+)" not implemented')
TYPE = re.compile(r"\btorch\.(?=[A-Z]\w*Tensor\b)|\bCPU(?=\w+Type\b)")
ON_GPU = {"torch.": "torch.cuda.", "CPU": "CUDA"}


def of_cuda(error: Exception) -> Exception:
    """The same error, or one of its type in CUDA's words."""
    said = str(error)
    found = KERNEL.match(said)
    if found is not None and found[1] in KERNELS:
        said = said.replace(found[1], KERNELS[found[1]], 1)
    if "Expected tensor for argument" in said:
        said = TYPE.sub(lambda prefix: ON_GPU[prefix[0]], said)
    return error if said == str(error) else type(error)(said)
