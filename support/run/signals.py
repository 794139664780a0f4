"""SIGTERM and Ctrl-C: the first one asks a run to save and stop, a second Ctrl-C ends it at once."""

import os
import signal
import threading
import time

from support.base.ranks import is_first_rank, say

SAME_REQUEST_S = 2.0  # a scheduler may signal every process while torchrun passes the same signal on


class StopSignals:
    """Turns SIGTERM and SIGINT into `requested`, the first one's name; make it on the main thread.

    `requested` is this rank's alone and changes at any moment: the ranks have to agree on it before they act.
    """

    # torchrun starts each rank in a session of its own, so a Ctrl-C reaches the ranks through torchrun only (torch
    # 2.13). It passes the signal on once, waits --shutdown-timeout (TORCH_ELASTIC_SHUTDOWN_TIMEOUT; 30 s, before torch
    # 2.12 always), then kills. A second Ctrl-C makes it send SIGTERM, not SIGINT. Its own exit code is 1 either way.

    def __init__(self):
        self.requested: str | None = None
        self.ended = False  # the run has ended: a signal does not make it save
        read, write = os.pipe()
        os.set_blocking(write, False)
        # A handler waits until the main thread is back in Python; the pipe is written at once, even in a collective.
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._listen, args=(read,), daemon=True).start()

    def _listen(self, pipe: int) -> None:
        first, since = None, 0.0
        while True:
            number = os.read(pipe, 1)[0]
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            if first is None:
                first, since = number, time.monotonic()
                self.requested = signal.Signals(number).name
                if is_first_rank() and not self.ended:
                    say(f"{self.requested}: finishing this phase, then saving; a second Ctrl-C stops at once")
            elif signal.SIGINT in (first, number) and time.monotonic() - since >= SAME_REQUEST_S:
                os._exit(130)
