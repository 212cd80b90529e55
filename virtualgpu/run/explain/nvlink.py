"""A card that has no NVLink, with it: what `--explain` asks for, and the run with that change has."""

from dataclasses import replace

from virtualgpu.hardware import bridges
from virtualgpu.hardware.datasheet import Spec
from virtualgpu.hardware.specs import SPECS

NVLINKS = {6: "P100-SXM2", 7: "V100", 8: "A100", 9: "H100"}  # by the first number of the capability; later ones: B200


def nvlinked(spec: Spec, gpus: int) -> tuple[Spec, str]:
    """The card with NVLink, and a word for it: its own bridge, where there is one for so many; otherwise the links of the server
    card of its generation. Raises ValueError for a card that has NVLink."""
    if spec.nvlink is not None:
        raise ValueError(f"{spec.name} has NVLink")
    try:
        bridged, why = bridges.bridged(spec), "its bridge joins two"
        if gpus == 2:
            return bridged, "NVLink (the bridge of two such cards)"
    except ValueError:
        why = "this card takes none"
    like = NVLINKS.get(spec.capability[0], "B200")
    article, other = "an" if like[0] in "AH" else "a", SPECS[like]
    linked = replace(spec, nvlink=other.nvlink, peer=other.peer, peer_access=True)
    return linked, f"NVLink as {article} {like} has it ({why})"
