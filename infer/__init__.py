"""Programs over the library: generate, chat, tree. Here: what Ctrl-C does to them.

Python's own way, an exception raised wherever the program happens to be, does not work while large
libraries are imported and programs are compiled: a foreign callback swallows it, or an import turns it
into an error of its own. So a thread of its own is told of the signal and ends the process.

Nothing heavy is imported here: until `watch` has run, some 20 ms after the interpreter's start, Ctrl-C is
Python's.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator

STATUS = 130  # what a shell gives a command that Ctrl-C ended
GRACE = 2.0  # seconds for the cleaning up of `unwinding`


class Interrupts:
    """Ctrl-C ends the process with status 130 and one line, wherever it is, from `watch` on."""

    def __init__(self) -> None:
        self.came = False
        self.restore = b""  # what brings a terminal back in order
        self._messages = False  # whether there is a standard error
        self._watching = self._raising = False
        self._leaving = _thread.allocate_lock()

    def watch(self) -> None:
        """From now on Ctrl-C ends the process; not where it was told to ignore it, as background jobs are."""
        if self._watching or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
            return
        self._watching = True
        # Were it closed, another file might be opened in its place.
        self._messages = sys.stderr is not None
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, self._signalled)
        _thread.start_new_thread(self._wait, (read,))

    @contextlib.contextmanager
    def unwinding(self) -> Iterator[None]:
        """Ctrl-C raises KeyboardInterrupt in here, so that the code can take away what it began to write.

        The process ends when the code is done, but at the second Ctrl-C or after a while at the latest: the
        exception may have been swallowed.
        """
        self._raising = True
        try:
            yield
        finally:
            self._raising = False
            if self.came:
                self.leave()

    def hand_over(self) -> None:
        """Give Ctrl-C back to Python (KeyboardInterrupt): the program lives on. An ignored one stays so."""
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def leave(self) -> None:
        """End the process at once."""
        if not self._leaving.acquire(blocking=False):
            time.sleep(60)  # another thread is about to
        line = self.restore + (b"\n" if self._messages and os.isatty(2) else b"") + b"interrupted\n"
        if self._messages:
            with contextlib.suppress(OSError):
                os.write(2, line)
        os._exit(STATUS)

    def _signalled(self, *_: object) -> None:
        """On the main thread, when it next runs Python code."""
        self.came = True
        # An exception that is swallowed in a callback is reported with a traceback otherwise.
        sys.unraisablehook = _nothing
        if self._raising:
            raise KeyboardInterrupt

    def _wait(self, read: int) -> None:
        """On a thread of its own: the main thread may be inside a library for long."""
        # Delivered here, the signal would not end the main thread's waiting for input.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while True:
            if signal.SIGINT not in os.read(read, 1):
                continue
            if signal.getsignal(signal.SIGINT) != self._signalled:
                continue  # a program that lives on
            if self._raising:
                select.select([read], [], [], GRACE)
            self.came = True
            self.leave()


def _nothing(_: object) -> None:
    pass


interrupts = Interrupts()
if sys.argv[:1] == ["-m"]:  # Python is looking for a program of this package, to run it
    interrupts.watch()
