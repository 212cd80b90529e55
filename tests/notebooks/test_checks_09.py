"""The graders of notebook 09: ranks that leave together, and a training function that is killed and ends with the same bits."""

import random

import pytest

import checks
from checks.notebook_09 import RANKS, Kill, killed
from tests.notebooks.answers import PASSED, solution, table

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
SKIPPED = "batches = iter(DataLoader(data, batch_size=8, sampler=sampler))\n        for _ in range(done):\n            next(batches)"

test_ends_the_same = table(checks.ends_the_same, "09", "train", [
    (("train_ddp.save(state, path)", "pass"), "nothing was saved, or nothing is read"),
    ((OPTIMIZER, "pass", GENERATOR, "pass"), "its generator is not back"),
    ((OPTIMIZER, "pass"), "what does the optimizer remember?"),
    ((GENERATOR, GENERATOR.replace("[rank]", "[0]")), "rank 1 draws another rank's dropouts"),
    (('state["epoch"], state["done"]', 'state["epoch"], 0'), "are batches of its epoch trained twice"),
    ((EPOCH, "        if not done:\n    " + EPOCH), "reads other samples than were left"),  # the rest is in the order of the epoch before
    (("train_ddp.save", "torch.save"), "was killed in the middle of a save; started again, rank"),
    ((EPOCH, "        pass"), "every epoch has the samples in the order of the first"),
    (("ddp(x.cuda())", "model(x.cuda())"), "the ranks end with different weights: who averages the gradients?"),
    ((REST, f"{ORDER}.tolist()[16 * done :]", "batch_size=8", "batch_size=16"), "reads 112 of 112 samples, 224 times in all"),
    (("rest = " + REST, SKIPPED, LOADER, "batches"), PASSED),  # it loads the batches that are done
])  # fmt: skip

STEPS = "step % 10"

test_leaves_together = table(checks.leaves_together, "09", "leave", [
    ((STEPS, "False"), "in 100 steps the ranks talk to each other more than 11 times"),
    (lambda noticed, step: noticed, "one rank got a notice, and not every rank leaves"),
    ((STEPS, "not noticed"), "some ranks wait for others that do not come"),
    ((STEPS, "step % 50 < 49"), "more than 10 steps pass"),
    (lambda noticed, step: True, "the ranks leave, and there was no notice"),
    (('torch.tensor(int(noticed), device="cuda")', "torch.tensor([float(noticed)]).cuda()", ", dist.ReduceOp.MAX", ""), PASSED),
])  # fmt: skip


@pytest.mark.judge
def test_fifty_kills():
    """At every rank, batch and save that there is, by chance."""
    draws = random.Random(9)
    kills = [Kill(draws.randrange(RANKS), batch=draws.randrange(1, 15)) if draws.random() < 0.7 else Kill(0, save=draws.randrange(1, 5))
             for _ in range(50)]  # fmt: skip
    assert killed(*solution("09", "train"), kills, seed=0) is None
