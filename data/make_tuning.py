"""Make tuning.npz: what networks of lesson 05 reached, so that a thousand searches can look it up instead of training.

Small networks learn 200 of the handwritten digits; 400 others validate, 397 test. Three tables of trained networks:

* `losses`, `right`: every pair of 25 learning rates and 5 weight decays, after each of 16 rounds of 192 images, six times with other seeds
* `ways`: test accuracy of what one can do with the images that nine trials see: search, train longer, another model, more images
* `by_images`, `by_steps`: validation accuracy of batch sizes, after equal images and after equal steps

and, from the first, `studies`: what Optuna's searches find in them, best accuracy so far after the cost of 1, 2, ... 20 full trials.

Some twenty minutes on one core. The last digits differ from processor to processor, and many steps magnify them.
"""

import random
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import optuna
import torch
from make_digits import write
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from helpers.data import digits

RATES = [10 ** (-3 + k / 8) for k in range(25)]
DECAYS = [10.0**-k for k in (6, 5, 4, 3, 2)]
SETS, ROUNDS = 6, 16
SEEDS = 10  # of each way
SIZES = [2, 8, 16, 32, 64, 100, 200]
BATCH_RATES = [1e-3, 3e-3, 1e-2, 3e-2, 1e-1]
COST = 20  # of a study, in full trials
IMAGES, STEPS = 6400, 200  # that every batch size has seen, and steps that each has made
Adam = partial(torch.optim.Adam, fused=True)  # one call for all weights

torch.set_num_threads(1)
images, labels = digits()
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
images, labels = images[order], labels[order]
few, many = (images[:200], labels[:200]), (images[:1000], labels[:1000])
valid, test = (images[1000:1400], labels[1000:1400]), (images[1400:], labels[1400:])


def mlp(l1=64, l2=64):
    hidden = [nn.Linear(64, l1), nn.ReLU(), nn.Linear(l1, l2), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(l2, 10))


def cnn():
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(128, 10))


def fit(net, optimizer, data, steps, batch_size=16):
    x, y = data
    for batch in torch.randint(len(x), (steps, batch_size)):
        optimizer.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()


@torch.no_grad()
def score(net, data):
    """Loss, and how many are right."""
    scores = net(data[0])
    loss = F.cross_entropy(scores, data[1]).nan_to_num(10.0).item()
    return min(10.0, loss), (scores.argmax(1) == data[1]).sum().item()


def curve(seed: int, i: int, j: int) -> tuple[list[float], list[int]]:
    """Loss, and number right of 400, after each round of the network with this rate and this weight decay."""
    torch.manual_seed(1000 * seed + i * len(DECAYS) + j)
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATES[i], momentum=0.9, weight_decay=DECAYS[j], fused=True)
    seen = []
    for _ in range(ROUNDS):
        fit(net, optimizer, few, 6, 32)
        seen.append(score(net, valid))
    return tuple(map(list, zip(*seen, strict=True)))


def curves(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Both [25 rates, 5 decays, 16 rounds], of networks with seeds of their own."""
    table = np.array([[curve(seed, i, j) for j in range(len(DECAYS))] for i in range(len(RATES))])
    return table[:, :, 0].astype(np.float32), table[:, :, 1].astype(np.uint16)


def trained(seed, make=mlp, lr=1e-3, data=few, trials=1):
    """A network that has seen as many images as so many trials."""
    torch.manual_seed(seed)
    net = make()
    fit(net, Adam(net.parameters(), lr=lr), data, 192 * trials)
    return net


def best(nets):
    return min(nets, key=lambda net: score(net, valid)[0])


def rate(seed, n=9):
    """Rates from 0.0003 to 0.1, evenly."""
    return [(10 ** (-3.5 + 2.5 * k / (n - 1)), 64, 64) for k in range(n)]


def rate_and_size(seed, n=9):
    draw = random.Random(seed)
    return [(10 ** draw.uniform(-3.5, -1), *[draw.choice([64, 128, 256])] * 2) for _ in range(n)]


def searched(seed, settings, data=few):
    nets = [trained(100 * seed + k, partial(mlp, l1, l2), lr, data) for k, (lr, l1, l2) in enumerate(settings(seed))]
    return best(nets)


def rate_then_longer(seed):
    """Five rates for one trial each, the best of them for four."""
    tried = rate(seed, 5)
    nets = [trained(100 * seed + k, lr=lr) for k, (lr, *_) in enumerate(tried)]
    lr, *_ = tried[nets.index(best(nets))]
    return trained(100 * seed + 50, lr=lr, trials=4)


WAYS = {
    "default, one trial": lambda seed: trained(seed),
    "search the rate": lambda seed: searched(seed, rate),
    "search rate and size": lambda seed: searched(seed, rate_and_size),
    "train longer": lambda seed: trained(seed, trials=9),
    "search the rate, then longer": rate_then_longer,
    "a small CNN": lambda seed: trained(seed, cnn, trials=9),
    "five times the images": lambda seed: trained(seed, data=many, trials=9),
}


STUDIES = {
    "random": (optuna.samplers.RandomSampler, False),
    "TPE": (optuna.samplers.TPESampler, False),
    "HyperBand": (optuna.samplers.RandomSampler, True),
    "BOHB": (optuna.samplers.TPESampler, True),
}


def batch(size: int, lr: float, seed: int) -> tuple[float, float]:
    """Right of 400 after IMAGES, and after STEPS."""
    torch.manual_seed(seed)
    net = mlp()
    optimizer = Adam(net.parameters(), lr=lr)
    reached, done = {}, 0
    for steps in sorted({IMAGES // size, STEPS}):
        fit(net, optimizer, few, steps - done, size)
        reached[steps], done = score(net, valid)[1], steps
    return reached[IMAGES // size], reached[STEPS]


def ways(seeds: Iterable[int]) -> np.ndarray:
    """Test accuracy from 0 to 1 [ways, seeds]."""
    right = [[score(way(seed), test)[1] for seed in seeds] for way in WAYS.values()]
    return (np.array(right) / len(test[0])).astype(np.float32)


def batches(seeds: Iterable[int]) -> np.ndarray:
    """Images right of 400 [sizes, rates, seeds, 2]."""
    right = [[[batch(size, lr, seed) for seed in seeds] for lr in BATCH_RATES] for size in SIZES]
    return np.array(right).astype(np.uint16)


def study(right: np.ndarray, seed: int, sampler: type, stops: bool) -> list[int]:
    """The most images right (of 400) that one search has seen, after the cost of each full trial. right: [sets, rates, decays, rounds]."""
    hyperband = optuna.pruners.HyperbandPruner(min_resource=4, max_resource=ROUNDS, reduction_factor=2)
    pruner = hyperband if stops else optuna.pruners.NopPruner()
    search = optuna.create_study(  # HyperBand draws rungs by the name
        study_name=str(seed), direction="maximize", sampler=sampler(seed=seed), pruner=pruner
    )
    best, seen = 0, []
    while len(seen) < ROUNDS * COST:
        trial = search.ask()
        rate, decay = trial.suggest_float("rate", 0, 1), trial.suggest_float("decay", 0, 1)
        values = right[seed % len(right), round(rate * (len(RATES) - 1)), round(decay * (len(DECAYS) - 1))]
        for at, value in enumerate(values.tolist(), 1):
            best = max(best, value)
            seen.append(best)
            trial.report(value, at)
            if stops and trial.should_prune():
                search.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            search.tell(trial, value)
    return seen[ROUNDS - 1 : ROUNDS * COST : ROUNDS]


def studies(right: np.ndarray, count: int = 60) -> np.ndarray:
    """[kinds, studies, 20]; studies of one number have one seed, and one set of networks."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return np.array([[study(right, seed, *kind) for seed in range(count)] for kind in STUDIES.values()], np.uint16)


def main() -> None:
    losses, right = map(np.stack, zip(*[curves(seed) for seed in range(SETS)], strict=True))
    print("curves", flush=True)
    print("ways", flush=True)
    reached = ways(range(SEEDS))
    print("batch sizes", flush=True)
    sizes = batches(range(4))
    arrays = {"losses": losses, "right": right, "rates": np.array(RATES), "decays": np.array(DECAYS)}
    arrays |= {"names": np.array(list(WAYS)), "ways": reached, "sizes": np.array(SIZES)}
    arrays |= {"by_images": sizes[..., 0], "by_steps": sizes[..., 1]}
    arrays |= {"study_names": np.array(list(STUDIES)), "studies": studies(right)}
    write(Path(__file__).with_name("tuning.npz"), arrays)


if __name__ == "__main__":
    main()
