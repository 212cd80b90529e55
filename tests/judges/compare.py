"""Are two results the same in every bit, which storages do tensors share, and a finding in one line."""

import torch


def different(one, other) -> str:
    """In what two results differ; empty where they are equal in every bit, nan for nan."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        same = type(one) is type(other) and (one == other or (one != one and other != other))
        return "" if same else f"{str(one)[:60]} instead of {str(other)[:60]}"
    if (one.layout, one.dtype, one.shape) != (other.layout, other.dtype, other.shape):
        mine, theirs = (f"{tensor.layout} {tensor.dtype} {tuple(tensor.shape)}" for tensor in (one, other))
        return f"{mine} instead of {theirs}"
    for mine, theirs in zip(parts(one), parts(other), strict=True):
        mine, theirs = mine.detach().cpu(), theirs.detach().cpu()
        if mine.shape != theirs.shape:
            return f"{tuple(mine.shape)} instead of {tuple(theirs.shape)}"
        same = _bits(mine) == _bits(theirs)
        if mine.is_floating_point() or mine.is_complex():
            numbers = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (mine, theirs)]
            same = same | (numbers[0].isnan() & numbers[1].isnan())
        if not same.all():
            return f"{int((~same).sum())} of {same.numel()} numbers differ"
    return ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return tensor
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(whole[tensor.dtype.itemsize])


def storages(values) -> dict[int, int]:
    """Bytes of each storage on a GPU that these tensors share, by its identity."""
    found = {}
    for value in values:
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            for tensor in parts(value):
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return found


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a tensor is made of: itself, or indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    names = ("crow_indices", "col_indices") if by_row else ("ccol_indices", "row_indices")
    return [*(getattr(tensor, name)() for name in names), tensor.values()]


def told(what) -> str:
    """A finding in one line of at most 240 characters."""
    if isinstance(what, BaseException):
        what = f"{type(what).__name__}: {what}"
    return " ".join(str(what).split())[:240]
