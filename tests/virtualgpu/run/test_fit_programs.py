"""Programs side by side: what ends them."""

import signal
import threading
import time

import pytest

from virtualgpu.run.trials.programs import Programs, ended_by_sigterm


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
