"""How far a call goes through the house: which files of virtualgpu a product, an all-reduce and a step of DDP pass through.

Who changes the way of a call reads it whole. These limits may only fall, and virtualgpu/docs/ddp_step.md names each file on the longest of them.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

import virtualgpu
from virtualgpu import _compat
from virtualgpu.engine.overrides import Nested

ROOT = Path(virtualgpu.__file__).parent
MORE = int(_compat.KEEPS_WORKSPACES)  # a product of an older PyTorch asks for its workspace, too
PAGE = ROOT / "docs" / "ddp_step.md"


def walk_of(function) -> list[str]:
    """The file of each call that `function` makes below virtualgpu/, in order."""
    files = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT}{os.sep}"):
            files.append(Path(frame.f_code.co_filename).relative_to(ROOT).as_posix())

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return files


def of_a_product() -> list[str]:
    a = torch.ones(64, 64, device="cuda")
    for _ in range(3):  # what is asked once is known then
        a @ a
    return walk_of(lambda: a @ a)


def of_a_rank() -> list[list[list[str]]]:
    """Some walks of an all_reduce, and some of a step."""
    import torch.distributed as dist

    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    x = torch.ones(1024, device="cuda")
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).cuda()
    model, texts = nn.parallel.DistributedDataParallel(net, [rank]), torch.randn(4, 32, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(texts).sum().backward()
        optimizer.step()

    walks = []
    for function in (lambda: dist.all_reduce(x), step):
        for _ in range(3):
            function()
        walks.append([walk_of(function) for _ in range(5) if dist.barrier() is None])
    return walks


def test_the_walk_of_a_product(gpus, monkeypatch):
    monkeypatch.setattr(Nested, "some", False)  # another test of this process may have made one
    walk = of_a_product()
    assert len(walk) <= 20 + MORE and len(set(walk)) <= 8, walk


def test_the_walks_of_an_all_reduce_and_of_a_ddp_step(on_gpus):
    """Who waits for the other rank looks several times: the shortest walk counts."""
    zero, one = on_gpus(of_a_rank, n=2)
    all_reduce, step = (min(first + second, key=len) for first, second in zip(zero, one, strict=True))
    assert len(all_reduce) <= 63 and len(set(all_reduce)) <= 10, all_reduce
    assert len(step) <= 657 + 5 * MORE and len(set(step)) <= 34, sorted(set(step))
    page = PAGE.read_text("utf-8")
    assert not [name for name in sorted(set(step)) if f"`{name}`" not in page]
