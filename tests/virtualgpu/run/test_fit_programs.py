"""Programs side by side: what ends them."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.processes import wait_until
from virtualgpu.run.fit import cli
from virtualgpu.run.trials import forked as trials
from virtualgpu.run.trials.forked import Programs, ended_by_sigterm


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX threads")
def test_a_signal_that_another_thread_was_given_is_heard():
    """The system may give it to any; Python handles it in the main thread, which then must not sleep until a program ends."""
    heard, late = threading.Event(), []

    def work(_):
        time.sleep(0.5)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        late.append(not heard.wait(20))

    class Ended(Programs):
        def end(self):
            heard.set()
            super().end()

    with pytest.raises(SystemExit) as error, ended_by_sigterm(), Ended() as programs:
        programs.side_by_side(work, [0], 1)
    assert error.value.code == 143 and late == [False]


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_an_interrupt_in_the_midst_of_a_start_leaves_no_program(monkeypatch, ctrl_c):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__(command, **options)
            if command[-1] == "leaf":
                started.append(self)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.5)

    monkeypatch.setattr(trials.subprocess, "Popen", Popen)
    leaf = [sys.executable, "-S", "-c", "import time; time.sleep(300)", "leaf"]
    with pytest.raises(KeyboardInterrupt), Programs() as programs:
        programs.run(leaf, dict(os.environ), subprocess.DEVNULL)
    wait_until(lambda: started[0].poll() is not None)


def test_no_thread_more_is_said_with_the_cure(monkeypatch, capsys):
    def full(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    assert cli.main(["train.py"]) == 2
    error = capsys.readouterr().err
    assert "can't start new thread (no process or thread more: raise this user's limit, `ulimit -u`" in error
    assert error.count("\n") == 1
