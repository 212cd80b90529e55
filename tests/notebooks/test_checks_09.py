"""The graders of notebook 09: ranks that leave together, and a training function that is killed and ends with the same bits."""

import random

import pytest
from torch.utils.data import Subset

import checks
from checks.notebook_09 import RANKS, Kill, killed
from tests.notebooks.answers import PASSED, solution, table

pytestmark = pytest.mark.usefixtures("no_gpus_before")

SAVE, SAVES = "train_ddp.save(state, path)", "if done % 3 == 0:"
BARRIER = "                dist.barrier()"
OPTIMIZER, GENERATOR = (
    'optimizer.load_state_dict(state["optimizer"])',
    'torch.cuda.set_rng_state(state["generators"][rank])',
)
EPOCH, REST, LOADER = (
    "        sampler.set_epoch(epoch)",
    "list(sampler)[8 * done :]",
    "DataLoader(data, batch_size=8, sampler=rest)",
)
ORDER = "torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))"
STEP = "            optimizer.step()"
AVERAGED = (
    "            for p in model.parameters():\n                dist.all_reduce(p.grad, dist.ReduceOp.AVG)\n" + STEP
)
SKIPPED = "batches = iter(DataLoader(data, batch_size=8, sampler=sampler))\n        for _ in range(done):\n            next(batches)"
NEXT_FILE = (
    BARRIER,
    BARRIER + "\n                train_ddp.save(torch.cuda.get_rng_state(), path.with_suffix(f'.{rank}'))",
)

test_ends_the_same = table(checks.ends_the_same, "09", "train", [
    ((SAVE, "pass"), "nothing was saved, or nothing is read"),
    ((OPTIMIZER, "pass", GENERATOR, "pass"), "its generator is not back"),
    ((OPTIMIZER, "pass"), "what does the optimizer remember?"),
    ((GENERATOR, GENERATOR.replace("[rank]", "[0]")), "rank 1 draws another rank's dropouts"),
    (('state["epoch"], state["done"]', 'state["epoch"], 0'), "are batches of its epoch trained twice"),
    ((EPOCH, "        if not done:\n    " + EPOCH), "reads other samples than were left"),  # the rest is in the order of the epoch before
    (("train_ddp.save", "torch.save"), "was killed in the middle of a save; started again, rank"),
    # a file of each rank, which belongs to whichever save came last
    ((*NEXT_FILE, GENERATOR, "torch.cuda.set_rng_state(torch.load(path.with_suffix(f'.{rank}')))"), "was killed in the middle of a save; started again, "),
    ((SAVES, "if done % 3 == 0 and not epoch:"), "is it saved too seldom?"),
    ((EPOCH, "        pass"), "every epoch has the samples in the order of the first"),
    (("ddp(x.cuda())", "model(x.cuda())"), "the ranks end with different weights: who averages the gradients?"),
    ((REST, f"{ORDER}.tolist()[16 * done :]", "batch_size=8", "batch_size=16"), "reads 112 of 112 samples, 224 times in all"),
    (lambda model, data, path: 1 / 0, "raised ZeroDivisionError: division by zero"),
    # the files' names say to which save they belong, and the last file to come, rank 0's, names it
    (("                generators =", "                train_ddp.save(torch.cuda.get_rng_state(), path.with_suffix(f'.{rank}.{epoch}.{done}'))\n" + BARRIER + "\n                generators =",
      'state["generators"][rank]', "torch.load(path.with_suffix(f\".{rank}.{state['epoch']}.{state['done']}\"))"), PASSED),
    (("rest = " + REST, SKIPPED, LOADER, "batches"), PASSED),  # it loads the batches that are done
    ((SAVES, "if True:", LOADER, "DataLoader(Subset(data, rest), batch_size=8)"), PASSED),
    # by hand
    (("DDP(model)", "model", LOADER, f"(data[part[rank::2]] for part in {ORDER}.split(16)[done:])", STEP, AVERAGED), PASSED),
], Subset=Subset)  # fmt: skip

STEPS, ALL_REDUCE, STOP = (
    "step % 10",
    "dist.all_reduce(stop, dist.ReduceOp.MAX)",
    'torch.tensor(int(noticed), device="cuda")',
)

test_leaves_together = table(checks.leaves_together, "09", "leave", [
    ((STEPS, "False"), "in 100 steps the ranks talk to each other more than 11 times"),
    (lambda noticed, step: noticed, "one rank got a notice, and not every rank leaves"),
    ((STEPS, "not noticed"), "some ranks wait for others that do not come"),
    (("MAX", "MIN"), "one rank got a notice, and not every rank leaves"),
    ((ALL_REDUCE, "dist.broadcast(stop, src=0)"), "not every rank leaves"),
    ((STEPS, "step % 50 < 49"), "more than 10 steps pass"),
    (lambda noticed, step: True, "the ranks leave, and there was no notice"),
    ((STEPS, "step % 10 < 9"), PASSED),
    ((STOP, "torch.tensor([float(noticed)]).cuda()", ", dist.ReduceOp.MAX", ""), PASSED),
    ((STOP, "[None] * dist.get_world_size()", ALL_REDUCE, "dist.all_gather_object(stop, noticed)", "bool(stop)", "any(stop)"), PASSED),
])  # fmt: skip


@pytest.mark.judge
def test_fifty_kills():
    """At every rank, batch and save that there is, by chance."""
    draws = random.Random(9)
    kills = [Kill(draws.randrange(RANKS), batch=draws.randrange(1, 15)) if draws.random() < 0.7 else Kill(0, save=draws.randrange(1, 5))
             for _ in range(50)]  # fmt: skip
    assert killed(*solution("09", "train"), kills, seed=0) is None
