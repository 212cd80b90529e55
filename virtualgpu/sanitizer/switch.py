"""Races looked for, on one machine's virtual GPUs: on and off."""

from virtualgpu.engine.machine import Machine
from virtualgpu.sanitizer import collectives, operations, waits
from virtualgpu.sanitizer.detector import Detector
from virtualgpu.torch_api.registry import Patches


def install(machine: Machine, patches: Patches) -> Detector:
    """Look for races from now on, until `patches` are restored. What is under way already is taken to be done."""
    detector = Detector(machine)
    waits.install(machine, patches, detector)
    operations.install(machine, patches, detector)
    collectives.install(machine, patches, detector)
    return detector
