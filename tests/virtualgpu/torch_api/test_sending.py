"""What a dry run sends to another process: numbers where they are known, shapes elsewhere."""

from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import virtualgpu


def answer(model, questions, answers):
    """A process that is in no dry run: it says what it was given."""
    given = [questions.get(), questions.get(), *model.parameters()]
    answers.put([(type(x).__name__, tuple(x.shape), x.device.type, x.requires_grad) for x in given])
    answers.put(given[0].tolist())


@pytest.fixture
def answered(gpus):
    def ask(make):
        context = mp.get_context("spawn")
        questions, answers = context.Queue(), context.Queue()
        with virtualgpu.dry_run():
            model, *tensors = make()
            process = context.Process(target=answer, args=(model, questions, answers))
            process.start()
            for tensor in tensors:
                questions.put(tensor)
            said = answers.get(timeout=100), answers.get(timeout=100)
        process.join()
        return said

    return ask


def test_queues_and_arguments(answered):
    def make():
        model = nn.Linear(128, 128, bias=False)  # its weight is too large to have numbers
        assert model.share_memory() is model
        return model, torch.arange(6.0).view(2, 3), torch.zeros(100, 100)

    said, first = answered(make)
    assert said == [
        ("Tensor", (2, 3), "cpu", False),
        ("Tensor", (100, 100), "meta", False),
        ("Parameter", (128, 128), "meta", True),
    ]
    assert first == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_a_gpu_tensor_is_refused(gpus):
    with virtualgpu.dry_run(), pytest.raises(NotImplementedError, match="CUDA IPC"):
        ForkingPickler.dumps(torch.ones(2, device="cuda"))


class OnGpu(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.ones(2, device="cuda")


def test_a_workers_gpu_tensor_is_refused_where_it_is_awaited(gpus):
    """The thread that would send it has nobody to tell."""
    loader = torch.utils.data.DataLoader(OnGpu(), num_workers=1, multiprocessing_context="fork", timeout=60)
    with pytest.raises(NotImplementedError, match="CUDA IPC"):
        next(iter(loader))


def test_a_gpus_memory_counts_as_shared(gpus):
    tensor = torch.ones(3)
    assert not tensor.is_shared() and tensor.share_memory_().is_shared()
    assert torch.ones(3, device="cuda").is_shared() and torch.ones(3, device="cuda").untyped_storage().is_shared()
    assert not torch.ones(3, device="cuda").cpu().is_shared()
