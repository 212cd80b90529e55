"""The cost of collectives, against PyTorch's own model of NCCL."""

import pytest

import virtualgpu
from virtualgpu.simulation import nccl

SIZES = (1, 100, 5000, 65536, 10**6, 25 << 20, 10**9)
RANKS = (2, 4, 8, 16, 32, 64, 512)


@pytest.mark.parametrize("card", ["V100", "A100", "H100", "B200", "A100-PCIE-40GB"])
def test_costs_are_those_of_pytorchs_model(card, monkeypatch):
    theirs = pytest.importorskip("torch._inductor.comm_analysis")
    if not hasattr(theirs, "_nccl_algo_time"):
        pytest.skip("this version of PyTorch has another model")
    monkeypatch.setenv("HELPERS_GPUS", "virtual")
    spec = virtualgpu.SPECS[card]
    virtualgpu.gpus(8, like=spec)
    monkeypatch.setattr(theirs, "_has_nvlink", lambda: spec.nvlink is not None)
    theirs.get_gpu_type.cache_clear()
    kinds = theirs.NCCL_COLL
    try:
        for kind in (kinds.ALL_REDUCE, kinds.ALL_GATHER, kinds.REDUCE_SCATTER, kinds.ALL_TO_ALL):
            for nbytes in SIZES:
                for ranks in RANKS:
                    ours = nccl.seconds(kind.name.lower(), nbytes, ranks, nccl.Fabric.of(spec), -(-ranks // 8))
                    assert ours == pytest.approx(
                        theirs.estimate_nccl_collective_runtime_impl(nbytes, ranks, kind) / 1e3, rel=1e-9
                    )
    finally:
        virtualgpu.reset()
        theirs.get_gpu_type.cache_clear()


def test_other_collectives_and_cards():
    h100, t4, titan = (nccl.Fabric.of(virtualgpu.SPECS[card]) for card in ("H100", "T4", "TITAN RTX"))
    assert (h100.nvlink, t4.nvlink) == (True, False) and t4.inside == pytest.approx(12)  # NCCL's PCI Express 3.0
    large = 10**9
    for kind in ("broadcast", "reduce", "gather", "scatter", "p2p", "all_reduce"):
        assert nccl.seconds(kind, large, 1, h100) == 0
        assert nccl.seconds(kind, large, 4, t4) > 5 * nccl.seconds(kind, large, 4, h100)
    assert nccl.seconds("barrier", 0, 4, h100) == nccl.seconds("all_reduce", 1, 4, h100)
    assert nccl.seconds("p2p", large, 2, t4) == pytest.approx(large / 12e9, rel=0.01)
    assert nccl.seconds("all_gather", large, 4, t4) == pytest.approx(0.75 * large / 12e9, rel=0.01)
    assert nccl.slowest([h100, t4]) == t4 and titan.inside == t4.inside
