"""Ranks on several nodes, and within one by the links that there are: how long collectives and messages last."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import virtualgpu
from virtualgpu.distributed.topology import Layout, Where
from virtualgpu.hardware import machine as settings
from virtualgpu.hardware.machine import NETWORKS, Fabric, find_network
from virtualgpu.hardware.specs import SPECS, find_spec
from virtualgpu.run.ranks import launch
from virtualgpu.timing import nccl

LARGE = 8 << 20


def layout(environs: list[dict], gpus, count: int, gpus_per_node=None, network=None, like="T4") -> Layout:
    """Of ranks with these variables, each with one of a machine's GPUs."""
    its = settings.find_settings(count, gpus_per_node, network)
    machine = SimpleNamespace(specs=[None] * count, ledger=None, settings=its)
    ranks = [SimpleNamespace(physical=gpu, spec=find_spec(like)) for gpu in gpus]
    wheres = [Where.of(machine, gpu, environ) for gpu, environ in zip(ranks, environs, strict=True)]
    return Layout([Where.of_json(where.as_json()) for where in wheres])


def torchrun(agents: int, local: int) -> list[dict[str, str]]:
    """The variables of each rank."""
    ranks = []
    for rank in range(agents * local):
        numbers = {"RANK": rank, "WORLD_SIZE": agents * local, "GROUP_RANK": rank // local}
        numbers |= {"LOCAL_WORLD_SIZE": local, "GROUP_WORLD_SIZE": agents}
        ranks.append({name: str(value) for name, value in numbers.items()})
    return ranks


OTHERS = [{"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"} for rank in range(4)]


@pytest.mark.parametrize(
    ("environs", "gpus", "machine", "nodes"),
    [
        ([{}] * 4, range(4), (4,), [0] * 4),
        ([{}] * 4, range(4), (4, 2), [0, 0, 1, 1]),
        (torchrun(1, 4), range(4), (4, 2), [0, 0, 1, 1]),  # one agent: no word of nodes
        (torchrun(2, 2), [0, 1, 0, 1], (2,), [0, 0, 1, 1]),
        (torchrun(4, 1), range(4), (4, 2), [0, 1, 2, 3]),  # several agents: their word
        (OTHERS, [0, 1, 0, 1], (2,), [0, 0, 1, 1]),
    ],
)
def test_who_is_on_which_node(environs, gpus, machine, nodes):
    assert layout(environs, gpus, *machine).nodes == nodes


def test_a_card_of_a_node_is_shared_by_its_groups():
    four, each, shared = torchrun(2, 2), "100 Gb/s", "100 Gb/s per node"
    assert layout(four, [0, 1, 0, 1], 2, None, shared).fabric.between == 12.5  # one group has all GPUs of the nodes
    assert layout(four[::2], [0, 0], 2, None, shared).fabric.between == 6.25  # two of them, side by side
    assert layout(four[::2], [0, 0], 2, None, each).fabric.between == 12.5


def test_messages_cross_the_network_only_between_nodes():
    found = layout([{}] * 4, range(4), 4, 2, "Ethernet 10")
    inside, across = found.message(LARGE, 0, 1), found.message(LARGE, 1, 2)
    assert inside == nccl.seconds("p2p", LARGE, 2, Fabric.of(SPECS["T4"]))
    assert inside == found.message(LARGE, 3, 2) and across == pytest.approx(LARGE / 1.25e9, rel=0.02)
    # does not pass the host's memory as a ring does
    assert layout([{}] * 4, range(4), 4, 2, "RoCE 100").message(LARGE, 1, 2) < inside / 2


def timed():
    """Seconds of an all_reduce and of a message from rank 0 to rank 1, and from rank 1 to rank 2 where there is one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(LARGE // 4, device=f"cuda:{rank}")
    with virtualgpu.recording() as spans:
        dist.all_reduce(x)
        for sender in range(min(2, size - 1)):
            if rank in (sender, sender + 1):
                dist.send(x, sender + 1) if rank == sender else dist.recv(x, sender)
        torch.cuda.synchronize()
    return [(span.name.split()[0], span.end - span.start) for span in spans if span.kind == "communication"]


def test_nodes_of_one_machine(capfd, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_LEVEL", "SYS")  # cards of a node reach each other
    virtualgpu.gpus(4, like="A100-PCIE-40GB", gpus_per_node=2, network="RoCE 100")
    found = launch(timed, nprocs=4)
    fabric = Fabric.of(SPECS["A100-PCIE-40GB"], find_network("RoCE 100"), "SYS")
    for (kind, seconds), *_ in found:
        assert kind == "all_reduce" and seconds == pytest.approx(nccl.seconds("all_reduce", LARGE, 4, fabric, 2))
    (_, inside), (_, across) = found[1][1:]
    assert inside == pytest.approx(nccl.seconds("p2p", LARGE, 2, fabric, 1))
    assert across == pytest.approx(nccl.seconds("p2p", LARGE, 2, fabric, 2)) and across > 1.1 * inside


def test_nvlink_and_without_peer_to_peer():
    """What Hugging Face measured (transformers, perf_train_gpu_many): 2 TITAN RTX with their bridge, and NCCL_P2P_DISABLE=1."""
    bridged, disabled = find_spec("TITAN RTX NVLink"), {"NCCL_P2P_DISABLE": "1"}
    for environ, like, how in (
        ({}, "TITAN RTX NVLink", ()),
        (disabled, "TITAN RTX NVLink", (None, "LOC")),
        (disabled, "TITAN RTX", (None, "LOC")),
    ):
        found = layout([environ] * 2, range(2), 2, like=like)
        for kind in ("all_reduce", "p2p"):
            assert found.seconds(kind, LARGE) == nccl.seconds(kind, LARGE, 2, Fabric.of(bridged, *how))


def gather() -> float:
    dist.init_process_group("nccl")
    x, out = torch.empty(LARGE, device="cuda"), torch.empty(512 * LARGE, device="cuda")
    with virtualgpu.recording() as spans:
        dist.all_gather_into_tensor(out, x)
    (span,) = spans
    return span.end - span.start


@pytest.mark.parametrize(("network", "slower"), [(None, 1), ("NDR", 1), ("HDR", 1.8), ("Ethernet 100", 25)])
def test_one_rank_of_many(network, slower):
    with virtualgpu.dry_run(world_size=512, network=network):
        found = gather()
    fabric = Fabric.of(SPECS["H100"], network and find_network(network))
    assert found == pytest.approx(nccl.seconds("all_gather", 4 * 512 * LARGE, 512, fabric, 64))
    with virtualgpu.dry_run(world_size=512):
        assert found >= 0.99 * slower * gather()
    assert virtualgpu.machine() is None


def test_what_cannot_be():
    for wrong, message in (
        ({"network": "carrier pigeon"}, "no network called 'carrier pigeon' here; choose one of InfiniBand HDR, .*Gb/s per node"),
        ({"gpus_per_node": 3}, "gpus_per_node=3 does not divide 4 GPUs"),
        ({"gpus_per_node": 0}, "give a whole number"),
        ({"like": "TITAN RTX NVLink"}, "NVLink bridge joins two equal cards"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            virtualgpu.gpus(4, **wrong)
    with pytest.raises(ValueError, match="joins two"), virtualgpu.dry_run(like="RTX 3090 NVLink", world_size=16):
        pass
    assert virtualgpu.machine() is None
    with virtualgpu.dry_run(like="RTX 3090 NVLink", world_size=16, gpus_per_node=2):
        assert torch.cuda.device_count() == 1


def test_asking_for_another_network_starts_afresh():
    virtualgpu.gpus(2, network="HDR")
    first = virtualgpu.machine()
    virtualgpu.gpus(2, network="InfiniBand HDR")
    assert virtualgpu.machine() is first and first.settings.network == NETWORKS["InfiniBand HDR"]
    with virtualgpu.dry_run(network="Ethernet 10"):
        assert first.settings.network.shared
    assert not first.settings.network.shared
    virtualgpu.gpus(2)
    assert virtualgpu.machine() is not first and virtualgpu.machine().settings.network is None
