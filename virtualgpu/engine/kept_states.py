"""How the random numbers of a fused kernel's forward pass are found again in its backward pass: the states of generators are kept, by a number.

That number stands in the seed that the kernel returns. A seed survives where saved tensors are moved about; the oldest states are dropped.
"""

import itertools
from collections import OrderedDict

import torch

from virtualgpu.engine.draws import Plain

STATES: OrderedDict[int, torch.Tensor] = OrderedDict()  # by their numbers
MAX_STATES = 4096  # 5 KB each
_numbers = itertools.count(1)


def keep(generator: torch.Generator) -> int:
    """Keep where a generator stands; returns the number of it."""
    number = next(_numbers)
    STATES[number] = Plain.get_state(generator)
    while len(STATES) > MAX_STATES:
        STATES.popitem(last=False)
    return number


def generator_at(seed: torch.Tensor) -> torch.Generator:
    """A generator that stands where that of the forward pass did, by the seed that it returned. Raises RuntimeError where that was too
    long ago."""
    number = int(seed.flatten()[0])
    if number not in STATES:
        raise RuntimeError(
            f"the random numbers of this attention's forward pass are no longer known: more than {MAX_STATES} with dropout came after it. "
            "Call backward() earlier, or set dropout_p=0"
        )
    generator = torch.Generator()
    generator.set_state(STATES[number])
    return generator
