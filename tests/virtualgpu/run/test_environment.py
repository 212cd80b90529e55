"""VIRTUALGPU and CUDA_VISIBLE_DEVICES, read."""

import uuid

import pytest

from virtualgpu import environment
from virtualgpu.environment import Card, Settings

T4, H100 = Card("T4", "Tesla T4", 15828254720, (7, 5)), Card("H100", "NVIDIA H100 80GB HBM3", 85017493504, (9, 0))


def test_settings_survive_the_environment():
    given = Settings((T4, T4, H100, T4), dry=True, folder="/tmp/x", trace=True)
    assert environment.settings({"VIRTUALGPU": given.text()}) == given
    assert given.text().count("Tesla T4") == 2  # equal neighbours are one group


def test_settings_by_hand():
    found = environment.settings({"VIRTUALGPU": '{"gpus": [{"like": "H100", "count": 2, "memory": "16 GB"}]}'})
    assert found == Settings((H100._replace(memory=16 << 30),) * 2)


def test_no_settings():
    assert environment.settings({}) is None and environment.settings({"VIRTUALGPU": ""}) is None


@pytest.mark.parametrize("text", ["2", "no JSON", "{}", '{"gpus": [{}]}'])
def test_unreadable_settings_say_so(text):
    with pytest.raises(ValueError, match=r"VIRTUALGPU=.*cannot be read"):
        environment.settings({"VIRTUALGPU": text})


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        ("1,-1,2", [1]),
        ("1,9,2", [1]),
        ("1gpu,2", [1, 2]),
        ("1,1", []),
        ("GPU-00000002,GPU-00000000-0000", [2, 0]),
        ("GPU-0000000", []),
        ("GPU-ffffffff,0", []),
    ],
)
def test_visible_devices(wanted, found):
    uuids = [environment.uuid(index) for index in range(4)]
    assert environment.visible(uuids, wanted) == found
    assert environment.visible_gpus(4, {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}) == found


def test_uuids_are_stable_and_well_formed():
    assert environment.uuid(3) == "GPU-00000003-0000-4000-7669-727475616c67"
    assert f"GPU-{uuid.UUID(environment.uuid(3)[4:])}" == environment.uuid(3)
    assert len({environment.uuid(index) for index in range(64)}) == 64


def test_agents_of_torchrun_see_their_nodes_gpus():
    def said(agent: int, agents: int, **others: str) -> dict[str, str]:
        return {"GROUP_RANK": str(agent), "GROUP_WORLD_SIZE": str(agents), **others}

    see = environment.visible_gpus
    assert [see(4, said(agent, 2), 2) for agent in range(2)] == [[0, 1], [2, 3]]
    assert see(4, said(1, 2)) == see(4, said(0, 1), 2) == see(4, {}, 2) == [0, 1, 2, 3]
    assert see(4, said(1, 2, CUDA_VISIBLE_DEVICES="1"), 2) == [3]
    with pytest.raises(ValueError, match=r"4 GPUs make 2 nodes of 2, and this process is on node 2"):
        see(4, said(2, 3), 2)


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({}, "PXB"),
        ({"NCCL_P2P_DISABLE": "0"}, "PXB"),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"}, "LOC"),
        *[({"NCCL_P2P_LEVEL": level}, "LOC") for level in ("LOC", "0")],
        *[({"NCCL_P2P_LEVEL": level}, "PXB") for level in ("NVL", "PIX", "PXB", "1", "2", "NODE", "")],
        *[({"NCCL_P2P_LEVEL": level}, "SYS") for level in ("PHB", "SYS", "3", "5")],
    ],
)
def test_peer_to_peer(variables, level):
    assert environment.peer_to_peer(variables) == level
