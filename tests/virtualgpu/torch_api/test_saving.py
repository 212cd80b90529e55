"""Files and loaders in a dry run: what they bring has its values, what is to be saved has none, and no file is lost for it."""

import io
import os
import re
import shutil
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import virtualgpu
from virtualgpu.engine.machine import dry_runs

WHERE = {
    "name": "cuda:1",
    "device": torch.device("cuda", 1),
    "dict": {"cpu": "cuda:1"},
    "function": lambda storage, location: storage.cuda(1),
}


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    content = {
        "weight": torch.arange(6.0).view(2, 3),
        "bias": nn.Parameter(torch.ones(2)),
        "count": torch.tensor([3, 4]),
    }
    torch.save(content, path)
    return path


def test_what_is_loaded_has_its_values(gpus, checkpoint):
    with virtualgpu.dry_run():
        found = torch.load(checkpoint)
        assert found["weight"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["bias"].requires_grad
        assert found.pop("count").tolist() == [3, 4]
        model = nn.Linear(3, 2).cuda()
        model.load_state_dict(found)
        assert model(torch.ones(4, 3, device="cuda")).shape == (4, 2)


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
def test_loaded_onto_a_gpu_it_takes_the_same_bytes(gpus, checkpoint, where, mmap):
    taken = {}
    for dry in (False, True):
        with virtualgpu.dry_run() if dry else nullcontext():
            before = torch.cuda.memory_allocated(1)
            found = torch.load(checkpoint, map_location=where, mmap=mmap)
            taken[dry] = torch.cuda.memory_allocated(1) - before
            assert {t.device for t in found.values()} == {torch.device("cuda", 1)}
            assert (found["weight"] @ found["weight"].T).shape == (2, 2)
            del found
    assert taken[True] == taken[False] == 3 * 512


@pytest.mark.parametrize("where", [None, "cuda:1"])
def test_a_file_that_is_mapped_keeps_its_numbers(gpus, tmp_path, where):
    """As safetensors reads one."""
    (tmp_path / "file").write_bytes(bytes(range(16)))
    with virtualgpu.dry_run():
        storage = torch.UntypedStorage.from_file(str(tmp_path / "file"), False, 16)
        read = torch.asarray(storage[4:12], dtype=torch.uint8, device=where)
        assert read.device == torch.device(where or "cpu") and read.tolist() == list(range(4, 12))


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("collate", [None, torch.stack], ids=["a batch of numbers", "a batch of tensors"])
def test_loaders_with_workers(gpus, collate, pinned):
    data = torch.arange(12).view(4, 3) if collate else range(4)
    with virtualgpu.dry_run():
        batches = list(DataLoader(data, batch_size=2, num_workers=1, collate_fn=collate, pin_memory=pinned))
        assert sum(batch.sum() for batch in batches).shape == ()
        assert [tuple(batch.cuda().shape) for batch in batches] == [(2, 3) if collate else (2,)] * 2


@pytest.mark.parametrize("pinned", [False, True])
def test_loaders_with_workers_hand_over_what_has_no_values(gpus, pinned):
    with virtualgpu.dry_run():
        data = torch.randn(12, 1024)  # too large to have values
        batches = list(DataLoader(data, batch_size=4, num_workers=1, pin_memory=pinned))
        assert [tuple(batch.shape) for batch in batches] == [(4, 1024)] * 3
        assert {batch.to("cuda", non_blocking=True).device for batch in batches} == {torch.device("cuda", 0)}


def test_a_file_stays_as_it_is(gpus, checkpoint):
    """torch.save empties a file before it looks at the tensors: a dry run of a training would lose the last one's weights."""
    before = checkpoint.read_bytes()
    with virtualgpu.dry_run():
        model = nn.Linear(3, 2).cuda()
        with pytest.warns(UserWarning, match=r"a dry run has no values to save: .*checkpoint\.pt is not written"):
            torch.save({"epoch": 3, "model": model.state_dict()}, checkpoint)
        with pytest.warns(UserWarning, match="is not written"):
            torch.save(nn.Linear(3, 2), checkpoint.with_name("new.pt"))  # on the CPU, too
    with pytest.raises(RuntimeError, match="no values to save"):
        torch.save(nn.ModuleList([model]), checkpoint)
    assert checkpoint.read_bytes() == before and os.listdir(checkpoint.parent) == [checkpoint.name]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_safetensors_leaves_a_file_as_it_is(gpus, tmp_path, device):
    """A Trainer of transformers saves by it at the end."""
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(3)}, path)
    with virtualgpu.dry_run():
        with pytest.warns(UserWarning, match=r"a dry run has no values to save: .*model\.safetensors is not written"):
            save_file(nn.Linear(3, 2, device=device).state_dict(), path)
        save_file(load_file(path), tmp_path / "copy")
    assert load_file(path)["weight"].tolist() == load_file(tmp_path / "copy")["weight"].tolist() == [1, 1, 1]


def time_of_saving(path, what):
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)]).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 256, device="cuda")).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
    start = virtualgpu.machine().clock.host
    if what == "state_dicts":
        torch.save({"model": model.state_dict(), "more": [1, (optimizer.state_dict(),)]}, path)
    else:
        torch.save(model, path)
    return virtualgpu.machine().clock.host - start


@pytest.mark.filterwarnings("ignore:a dry run has no values to save")
@pytest.mark.parametrize("what", ["state_dicts", "the model"])
def test_the_copies_to_the_cpu_take_their_time_in_a_dry_run_too(gpus, tmp_path, what):
    expected = time_of_saving(tmp_path / "model.pt", what)
    with virtualgpu.dry_run():
        assert time_of_saving(tmp_path / "another.pt", what) == pytest.approx(expected, rel=1e-9)


WAYS = {
    "replaced": lambda part, final: os.replace(part, final),
    "renamed by pathlib": lambda part, final: part.rename(final),
    "moved": lambda part, final: shutil.move(str(part), str(final)),
    "copied, then removed": lambda part, final: (shutil.copy2(part, final), part.unlink()),
    "linked, then removed": lambda part, final: (os.link(part, final), os.remove(part)),
    "copied into the folder": lambda part, final: (shutil.copy(part, final.parent), part.unlink()),
}


def beside(folder, there):
    """A path for the new checkpoint, and that of the old one, which is there or not."""
    part, final = folder / "parts" / "good.pt", folder / "good.pt"
    part.parent.mkdir()
    if there:
        torch.save({"epoch": 1}, final)
    return part, final


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("there", [True, False])
def test_a_checkpoint_written_beside_the_old_one(gpus, tmp_path, way, there):
    """What lesson 01 teaches; the old one stays, and where there was none there is none."""
    part, final = beside(tmp_path, there)
    originals = os.replace, os.rename, os.link, os.remove, os.unlink, shutil.copyfile, shutil.copy, shutil.copy2
    with virtualgpu.dry_run():
        for _ in range(2):
            with pytest.warns(UserWarning, match="good.pt is not written") as warned:
                torch.save(nn.Linear(3, 2).cuda().state_dict(), part)
            assert warned[0].filename == __file__
            WAYS[way](part, final)
        with pytest.raises(FileNotFoundError):
            os.replace(tmp_path / "another", final)
    virtualgpu.reset()
    assert originals == (
        os.replace,
        os.rename,
        os.link,
        os.remove,
        os.unlink,
        shutil.copyfile,
        shutil.copy,
        shutil.copy2,
    )
    assert list(part.parent.iterdir()) == [] and final.exists() is there
    assert not there or torch.load(final) == {"epoch": 1}
    with pytest.raises(FileNotFoundError):
        WAYS[way](part, final)


@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("linked")])
@pytest.mark.parametrize("there", [True, False])
def test_a_checkpoint_that_the_program_opens_beside_the_old_one(gpus, tmp_path, way, there):
    """As ignite's DiskSaver: the program's own file is empty, and never takes the place of the old one."""
    part, final = beside(tmp_path, there)
    with virtualgpu.dry_run():
        for _ in range(2):
            with open(part, "wb") as file, pytest.warns(UserWarning, match="good.pt is left empty") as warned:
                torch.save(nn.Linear(3, 2).cuda().state_dict(), file)
            assert warned[0].filename == __file__
            WAYS[way](part, final)
    assert list(part.parent.iterdir()) == []
    assert torch.load(final) == {"epoch": 1} if there else not final.read_bytes()


def test_a_file_that_holds_something_or_has_no_path_is_refused_in_a_dry_run(gpus, tmp_path):
    with virtualgpu.dry_run():
        weights = nn.Linear(3, 2).cuda().state_dict()
        with open(tmp_path / "all.pt", "wb") as file:
            file.write(b"header")
            with pytest.raises(RuntimeError, match="no values to save"):
                torch.save(weights, file)
        with pytest.raises(RuntimeError, match="no values to save"):
            torch.save(weights, io.BytesIO())


def test_what_is_there_moves_in_a_dry_run_too(gpus, tmp_path):
    part, final = tmp_path / "good.pt.part", tmp_path / "good.pt"
    with virtualgpu.dry_run():
        with pytest.warns(UserWarning, match="is not written"):
            torch.save(nn.Linear(3, 2).cuda().state_dict(), part)
        torch.save({"epoch": 1}, part)
        os.replace(part, final)
    assert torch.load(final) == {"epoch": 1} and not part.exists()


def test_what_has_values_is_saved_in_a_dry_run(gpus, checkpoint):
    with virtualgpu.dry_run():
        state = torch.get_rng_state()
        torch.save({"epoch": 3, "random": state}, checkpoint)
    found = torch.load(checkpoint)
    assert found["epoch"] == 3 and torch.equal(found["random"], state)


def test_pytorchs_own_meta_tensors_are_saved_as_ever(gpus, checkpoint):
    torch.save(torch.ones(3, device="meta"), checkpoint)
    assert torch.load(checkpoint).device.type == "meta"


class Counted:
    """How often it was pickled."""

    def __init__(self):
        self.times = 0

    def __reduce__(self):
        self.times += 1
        return dict, ()


@pytest.mark.parametrize("kind", ["a path", "a file"])
@pytest.mark.parametrize("when", ["never", "before", "inside"])
def test_what_is_saved_is_pickled_once(gpus, tmp_path, monkeypatch, when, kind):
    """Whether or not there is, or was, a dry run, whose tensors may be in it."""
    monkeypatch.setattr(dry_runs, "epoch", 1)
    if when == "before":
        with virtualgpu.dry_run():
            pass
    counted, weight = Counted(), torch.arange(3.0)
    target = tmp_path / "saved.pt" if kind == "a path" else io.BytesIO()
    with virtualgpu.dry_run() if when == "inside" else nullcontext():
        torch.save({"counted": counted, "weight": weight}, target)
    assert counted.times == 1
    if kind == "a file":
        target.seek(0)
    assert torch.equal(torch.load(target, weights_only=False)["weight"], weight)


def test_a_folder_that_is_not_there(gpus, tmp_path):
    with virtualgpu.dry_run(), pytest.raises((RuntimeError, FileNotFoundError), match="folder"):
        torch.save({"epoch": 3}, tmp_path / "folder" / "file.pt")


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("make", [lambda net, x: torch.jit.script(net), torch.jit.trace], ids=["scripted", "traced"])
def test_a_torchscript_module_is_saved_from_the_cpu(gpus, make, tmp_path):
    net, x = nn.Linear(3, 2), torch.ones(1, 3)
    wanted, there = net(x), make(net.cuda(1), x.cuda(1))
    for save in (lambda: torch.jit.save(there, io.BytesIO()), lambda: there.save(tmp_path / "net.pt")):
        with pytest.raises(NotImplementedError, match=re.escape("save module.cpu(), and load it with map_location")):
            save()
    torch.jit.save(make(net.cpu(), x), tmp_path / "net.pt")
    assert torch.equal(torch.jit.load(tmp_path / "net.pt")(x), wanted)
    loaded = torch.jit.load(tmp_path / "net.pt", map_location="cuda:1")
    assert loaded.weight.device == torch.device("cuda:1") and torch.equal(loaded(x.cuda(1)).cpu(), wanted)
