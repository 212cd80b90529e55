"""How long a GPU works on operations that are not like the others."""

import pytest
import torch

import virtualgpu

SIZE = 1 << 24
EMPTY = {
    "empty": lambda x: torch.empty(SIZE, device="cuda"),
    "empty_strided": lambda x: torch.empty_strided((SIZE,), (1,), device="cuda"),
    "empty_permuted": lambda x: torch.empty_permuted((SIZE,), (0,), device="cuda"),
    "empty_like": torch.empty_like,
    "empty_like on a GPU": lambda x: torch.empty_like(torch.empty(SIZE), device="cuda"),
    "new_empty": lambda x: x.new_empty(SIZE),
    "new_empty_strided": lambda x: x.new_empty_strided((SIZE,), (1,)),
}


def busy(make) -> float:
    """Seconds for which a GPU worked on it."""
    clock = virtualgpu.machine().clock
    before = clock.busy[0]
    make()
    return clock.busy[0] - before


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("dry", [False, True])
def test_memory_alone_takes_no_time(gpus, name, dry):
    with virtualgpu.dry_run() if dry else torch.no_grad():
        x = torch.zeros(SIZE, device="cuda")
        before = torch.cuda.memory_allocated()
        kept = []
        assert busy(lambda: kept.append(EMPTY[name](x))) == 0.0
        assert torch.cuda.memory_allocated() - before == 4 * SIZE
        assert busy(lambda: torch.zeros(SIZE, device="cuda")) > 0.0


def test_a_product_of_complex_numbers_is_four_of_real_ones(gpus):
    n = 512
    kinds = torch.float32, torch.complex64
    with virtualgpu.dry_run():
        large = {kind: torch.ones(16 * n, 16 * n, dtype=kind, device="cuda") for kind in kinds}
        seconds = {kind: busy(lambda x=x: x @ x) for kind, x in large.items()}
    assert seconds[torch.complex64] == pytest.approx(4 * seconds[torch.float32], rel=0.02)
    made = {kind: torch.ones(n, n, dtype=kind, device="cuda") for kind in kinds}
    assert torch.equal((made[torch.complex64] @ made[torch.complex64]).cpu(), torch.full((n, n), n + 0j))
