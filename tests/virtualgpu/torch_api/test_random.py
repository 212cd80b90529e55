"""Each GPU has its own random numbers, which leave the CPU's alone."""

import copy
import itertools
import pickle
import threading

import pytest
import torch
from torch.nn import functional as F

import virtualgpu

ZERO, ONE, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")

DRAWS = {
    "rand": lambda device, n: torch.rand(n, device=device),
    "randint": lambda device, n: torch.randint(0, 99, (n,), device=device),
    "rand_like": lambda device, n: torch.rand_like(torch.ones(n, device=device)),
    "dropout": lambda device, n: F.dropout(torch.ones(n, device=device)),
    "randn": lambda device, n: torch.randn(n, device=device),
    "normal": lambda device, n: torch.normal(0.0, 1.0, (n,), device=device),
    "randperm": lambda device, n: torch.randperm(n, device=device),
    "bernoulli": lambda device, n: torch.bernoulli(torch.full((n,), 0.5, device=device)),
    "multinomial": lambda device, n: torch.multinomial(torch.ones(n, device=device), 4),
    "uniform_": lambda device, n: torch.empty(n, device=device).uniform_(),
    "exponential_": lambda device, n: torch.empty(n, device=device).exponential_(),
    "rrelu": lambda device, n: F.rrelu(-torch.ones(n, device=device), training=True),
    "poisson": lambda device, n: torch.poisson(torch.ones(n, device=device)),
    "fractional": lambda device, n: F.fractional_max_pool2d(
        torch.arange(64.0, device=device).view(1, 1, 8, 8), 2, output_size=3
    ),
    "gumbel": lambda device, n: F.gumbel_softmax(torch.ones(n, device=device)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_drawing_on_a_gpu_leaves_the_others_alone(gpus, draw):
    torch.manual_seed(3)
    expected, state = draw(CPU, 8), torch.get_rng_state()
    torch.manual_seed(3)
    states = [torch.get_rng_state(), torch.cuda.get_rng_state(0)]
    found = draw(ONE, 8)
    assert found.device == ONE and torch.equal(found.cpu(), expected)  # one seed, one set of numbers
    assert torch.equal(torch.get_rng_state(), states[0]) and torch.equal(torch.cuda.get_rng_state(0), states[1])
    assert torch.equal(torch.cuda.get_rng_state(1)[:-16], state)
    draw(CPU, 8)
    assert torch.equal(torch.cuda.get_rng_state(1)[:-16], state)


@pytest.mark.parametrize("dry", [False, True])
def test_a_large_number_is_not_a_size(gpus, dry):
    """A seed of 62 bits, an arange of few steps far out: eight bytes each, where there was an error of exabytes."""
    with virtualgpu.dry_run() if dry else torch.enable_grad():
        seeds = torch.randint(1 << 62, (2,), device="cuda"), torch.randint(1 << 61, 1 << 62, (2,), device="cuda")
        assert all(seed.shape == (2,) and (dry or seed.min() >= 0) for seed in seeds)
        assert len(torch.arange(10**15, 10**15 + 5, device="cuda")) == 5
        assert torch.full((3,), 1e30, device="cuda").shape == (3,)
        assert torch.cuda.memory_stats()["num_ooms"] == 0


# -- seeds, states, generators


def test_seeds_of_gpus_and_cpu_are_apart():
    torch.manual_seed(7)  # before the GPUs are there
    virtualgpu.gpus(2)
    seventh = torch.rand(3, device=ONE)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3, device=ONE), seventh)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    torch.cuda.manual_seed(5)
    torch.cuda.manual_seed_all(6)
    assert torch.equal(torch.get_rng_state(), before) and torch.initial_seed() == 1
    assert torch.cuda.initial_seed() == 6 and [g.initial_seed() for g in torch.cuda.default_generators] == [6, 6]
    first = torch.rand(3, device=ZERO)
    assert torch.equal(first.cpu(), torch.rand(3, device=ONE).cpu())
    torch.manual_seed(6)  # all of them
    assert torch.equal(first, torch.rand(3, device=ZERO))


def test_generators(gpus):
    assert isinstance(torch.default_generator, torch.Generator) and torch.default_generator.device == CPU
    assert [generator.device for generator in torch.cuda.default_generators] == [ZERO, ONE]
    generator = torch.Generator(device="cuda:1").manual_seed(11)
    assert generator.device == ONE
    assert all(isinstance(one, torch.Generator) for one in (*torch.cuda.default_generators, generator))
    state, others = generator.get_state(), torch.cuda.get_rng_state(1)
    first = torch.rand(3, device=ONE, generator=generator)
    generator.set_state(state)
    assert torch.equal(first, torch.rand(3, device=ONE, generator=generator))
    assert torch.equal(torch.cuda.get_rng_state(1), others)
    assert torch.empty(3, device=ONE).normal_(generator=generator).device == ONE
    virtualgpu.reset()
    assert isinstance(torch.default_generator, torch.Generator)


COPIES = {
    "clone_state": lambda generator: generator.clone_state(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda generator: pickle.loads(pickle.dumps(generator)),
}


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_generator_is_of_its_device(gpus, make, device):
    for generator in (torch.Generator(device).manual_seed(5), torch.cuda.default_generators[1]):
        torch.rand(3, device=generator.device, generator=generator)
        copied = make(generator)
        assert copied is not generator and copied.device == generator.device
        assert copied.initial_seed() == generator.initial_seed()
        assert torch.equal(*[torch.rand(3, device=g.device, generator=g) for g in (copied, generator)])


@pytest.mark.parametrize(("kind", "device"), [("cpu", "cuda:0"), ("cuda", "cpu")])
def test_a_generator_of_another_device_is_refused(gpus, kind, device):
    generator, there = torch.Generator(device=kind), torch.device(device).type
    x = torch.ones(3, device=device)
    for draw in (
        lambda: torch.rand(3, device=device, generator=generator),
        lambda: x.normal_(generator=generator),
        lambda: torch.multinomial(x, 2, generator=generator),
        lambda: torch.randperm(3, device=device, generator=generator),
    ):
        with pytest.raises(RuntimeError, match=f"Expected a '{there}' device type for generator but found '{kind}'"):
            draw()
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("to", ["cpu", "default", "cuda", "cuda_all", "generator", "own"])
def test_a_state_lies_on_the_cpu_and_is_of_the_same_kind_of_device(gpus, to):
    """A checkpoint loaded with map_location="cuda" moves states, too."""
    setters = {
        "cpu": torch.set_rng_state,
        "default": torch.random.set_rng_state,
        "cuda": torch.cuda.set_rng_state,
        "cuda_all": lambda state: torch.cuda.set_rng_state_all([state]),
        "generator": torch.Generator("cuda").set_state,
        "own": torch.Generator().set_state,
    }
    on_cpu, on_gpu = torch.get_rng_state(), torch.cuda.get_rng_state()
    own, other = (on_cpu, on_gpu) if to in ("cpu", "default", "own") else (on_gpu, on_cpu)
    setters[to](own)
    with pytest.raises(TypeError, match=r"RNG state must be a torch.ByteTensor"):
        setters[to](own.cuda())
    with pytest.raises(RuntimeError, match=r"RNG state is wrong size|Expected a CPUGeneratorImplState of size 5056"):
        setters[to](other)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda g: g.graphsafe_get_state(), NotImplementedError, "CUDA graphs are not modelled"),
        (lambda g: g.graphsafe_set_state(g), NotImplementedError, "CUDA graphs are not modelled"),
        (lambda g: g.get_offset(), NotImplementedError, "get_state"),
        (lambda g: g.set_offset(4), NotImplementedError, "get_state"),
        (lambda g: torch.Generator().get_offset(), RuntimeError, "CPU Generator does not use offset"),
        (
            lambda g: g.set_state(torch.zeros(16, dtype=torch.uint8)),
            RuntimeError,
            r"16 bytes are the seed and the offset of a real GPU's generator.*manual_seed",
        ),
    ],
)
def test_what_generators_refuse(gpus, call, error, words):
    with pytest.raises(error, match=words):
        call(torch.Generator("cuda"))


def test_fork_rng_keeps_every_gpu(gpus):
    with torch.random.fork_rng(devices=[0, 1]):
        torch.rand(5, device=ONE), torch.rand(5)
        inside = torch.cuda.get_rng_state(1)
    assert not torch.equal(inside, torch.cuda.get_rng_state(1))
    states = torch.cuda.get_rng_state_all()
    torch.rand(5, device=ZERO)
    torch.cuda.set_rng_state_all(states)
    assert all(torch.equal(a, b) for a, b in zip(states, torch.cuda.get_rng_state_all(), strict=True))


# -- the same numbers again: in checkpoints, in threads, by operations that take no generator


@pytest.mark.parametrize("name", ["rand", "randint", "rand_like", "dropout"])  # PyTorch gives these no generator
def test_two_threads_draw_on_a_gpu_and_on_the_cpu(gpus, name):
    """Each the numbers that it would draw alone: so many that a kernel lets other threads go on."""
    n, times = 50_000, 40
    expected, on_gpu = [], []
    for draw, device, numbers in ((DRAWS["rand"], CPU, expected), (DRAWS[name], ONE, on_gpu)):
        torch.manual_seed(2)
        numbers += [draw(device, n).cpu() for _ in range(times)]
    torch.manual_seed(2)
    drawn, barrier = [], threading.Barrier(2)
    other = threading.Thread(
        target=lambda: drawn.extend(DRAWS[name](ONE, n).cpu() for _ in range(times) if barrier.wait() >= 0)
    )
    other.start()
    found = [torch.rand(n) for _ in range(times) if barrier.wait() >= 0]
    other.join()
    assert all(map(torch.equal, found, expected)) and all(map(torch.equal, drawn, on_gpu))


def test_an_operation_without_a_generator_keeps_other_threads_waiting(gpus):
    """An extension's own: it knows the process's generator alone, which has the GPU's state meanwhile."""
    library = torch.library.Library("virtualgpu_tests", "FRAGMENT")
    library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    begun, elsewhere = threading.Event(), []

    def noise(x):
        begun.set()
        other.join(0.2)  # it cannot go on before this is over
        return torch.empty_like(x).uniform_()

    library.impl("noise", noise, "CPU")
    other = threading.Thread(target=lambda: (begun.wait(), elsewhere.append(torch.rand(4))))
    torch.manual_seed(3)
    expected, after = torch.rand(4), torch.get_rng_state()
    torch.manual_seed(3)
    other.start()
    found = torch.ops.virtualgpu_tests.noise(torch.ones(4, device=ONE))
    other.join()
    assert torch.equal(found.cpu(), expected) and torch.equal(elsewhere[0], expected)
    assert torch.equal(torch.get_rng_state(), after) and torch.equal(torch.cuda.get_rng_state(1)[:-16], after)
    library._destroy()


def test_native_dropout_is_the_cpus_to_the_last_bit(gpus):
    """It is put together from operations that take a generator."""
    for dtype, p, train in itertools.product((torch.float32, torch.bfloat16), (0.0, 0.3, 1.0), (True, None, False)):
        x = torch.linspace(-2, 2, 60, dtype=dtype).view(5, 12).t()
        torch.manual_seed(4)
        expected = torch.native_dropout(x, p, train)
        torch.manual_seed(4)
        found = torch.native_dropout(x.to(ONE), p, train)
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other.cpu()) and one.stride() == other.stride()
