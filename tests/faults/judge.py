"""What is asked after a fault: nothing lost, nothing left, and where there is an error, words on its cause; all within a time."""

import os
import re
import signal
import subprocess

from tests.faults.disturb import Fault
from tests.faults.place import ROOT, Place
from tests.faults.subjects import Subject
from virtualgpu import scratch

TIMEOUT = subprocess.TimeoutExpired
PATIENCE = 60.0  # seconds in which processes may go after the first one has: one that imports PyTorch sees it only then
# An error of one of these kinds says where a program stumbled, not what a reader can do
RAW = r"(EOFError|BrokenPipeError|Connection\w*Error|AttributeError|TypeError|KeyError|IndexError|AssertionError|JSONDecodeError|UnboundLocalError|NameError)"
OF_PYTHON = ("Fatal Python error", "Segmentation fault")


def faults(subject: Subject, fault: Fault, place: Place, struck: str, status: int | None) -> tuple[str, list[str]]:
    """How it ended, in a word, and what is wrong with that. status: as Popen gives it; None where it had not ended in time."""
    said, complaint = place.said()
    wrong = []
    if status is None:
        return "hung", ["it had not ended in time"]
    is_right = status == 0 and all(line in said for line in subject.says)
    if is_right:
        end = "right"
    elif -status in fault.ended_by or (subject.passes_on and fault.number and -status in (fault.number, fault.then)):
        end = "ended"
    else:
        end = "said"
        wrong += _words(subject, fault, status, said, complaint)
        if fault.is_right:
            wrong.append(f"its result should have come: status {status}")
        end += f": {last(complaint or said)[:110]!r}"
    wrong += _raw(subject, complaint)
    if left := place.left(PATIENCE):
        wrong.append(f"{len(left)} processes left: {'; '.join(left[:3])}")
    place.unlock()
    wrong += subject.lost(place.work)
    wrong += _files(subject, place)
    return end, wrong


def _words(subject: Subject, fault: Fault, status: int, said: str, complaint: str) -> list[str]:
    """Not of a program that has been interrupted, or told to end: it owes none."""
    told = said + complaint
    if status == 0 and not (subject.may_be_0 and re.search(fault.owes, told)):
        return [f"status 0, and not its result: {last(told)!r}"]
    if fault.number in (signal.SIGINT, signal.SIGTERM) and fault.whom != "member":
        return []
    if fault.owes and not re.search(fault.owes, told):
        return [f"status {status}, no word on the cause: {last(complaint or said)!r}"]
    return []


def _raw(subject: Subject, complaint: str) -> list[str]:
    wrong = [f"{words}" for words in OF_PYTHON if words in complaint]
    if re.match(RAW, last(complaint)):
        wrong.append(f"raw: {last(complaint)!r}")
    for trace in complaint.split("Traceback (most recent call last):")[1:]:
        files = re.findall(r'^  File "([^"]+)", line', trace, re.M)
        # interrupted while modules load, before main(), any Python program says so with a traceback
        begun = ", in main\n" in trace or not last(trace).startswith("KeyboardInterrupt")
        if subject.is_ours and begun and any(path in files for path in subject.entries):
            wrong.append(f"a traceback of ours: {last(trace)!r}, from {os.path.relpath(files[-1], ROOT)}")
    return wrong


def _files(subject: Subject, place: Place) -> list[str]:
    """What a sweep at the next run's start leaves of the temporary files; not what Python leaves of any program's killed worker."""
    for disk in (place.tmp, place.shm):
        for entry in disk.iterdir():
            os.utime(entry, (0, 0), follow_symlinks=False)  # a young one may be somebody's who has not locked it yet
            if os.geteuid() == 0:  # where processes were limited another user ran it, whose next run would sweep
                os.chown(entry, 0, -1, follow_symlinks=False)
        scratch.sweep(str(disk))
    left = [f"{path.parent.name}/{path.name}" for disk in (place.tmp, place.shm) for path in disk.iterdir()]
    known = f"{KNOWN}|{OF_A_WORKER}" if subject.passes_on else KNOWN
    left = [name for name in left if not re.search(known, name)]
    return [f"files left: {', '.join(sorted(left)[:4])}"] if left else []


# Of others: what Triton and PyTorch's compiler keep for the next time, torchrun's log folder
KNOWN = r"torchinductor_|torchelastic_|/triton"
OF_A_WORKER = r"/pymp-|/torch_\d+_"  # the folder of multiprocessing's socket, and a tensor on its way to a loader


def last(text: str) -> str:
    """The last line, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
