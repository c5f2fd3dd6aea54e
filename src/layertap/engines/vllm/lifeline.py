"""The writer process's eye on its engine: when the engine's process is gone, the connection ends.

The end of the connection alone doesn't say it: a child that the engine forked holds a copy of the engine's end, and would keep a
writer waiting for as long as it lives. What had arrived whole is still read; then the connection reports its end.
"""

import logging
import os
import select
import socket
import threading

from layertap.files.locks import start_time

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0


class Lifeline:
    """Made by a direct child of the engine, before anything else; `guard` works in the child's children too.

    Args:
        engine_pid: the process that started this one.
    """

    def __init__(self, engine_pid: int) -> None:
        self._pid = engine_pid
        self._start = start_time(engine_pid)
        self._fd = -1
        try:
            self._fd = os.pidfd_open(engine_pid)
        except ProcessLookupError:
            self._start = ""
        except OSError as exc:  # an old kernel, or a sandbox that forbids it
            logger.debug("layertap: no pidfd (%s): the engine's process is looked at now and then", exc)
        if os.getppid() != engine_pid:  # it was gone before we looked; the number may be another's by now
            self._start = ""

    def guard(self, connection_fd: int) -> None:
        """End the connection when the engine is gone, from a thread."""
        # a copy, so that a connection that was closed meanwhile is no other file of the same number
        end = socket.socket(fileno=os.dup(connection_fd))
        threading.Thread(target=self._watch, args=(end,), name="layertap-lifeline", daemon=True).start()

    def wait(self) -> None:
        """Return when the engine's process is gone."""
        if not self._start:
            return
        if self._fd >= 0:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            poll.poll()
            return
        pause = threading.Event()
        while start_time(self._pid) == self._start:
            pause.wait(_POLL_SECONDS)

    def _watch(self, end: socket.socket) -> None:
        self.wait()
        with end:
            try:
                # both ways: nobody reads what we would send, and a full buffer would hold us for ever
                end.shutdown(socket.SHUT_RDWR)
            except OSError as exc:
                logger.debug("layertap: the connection had ended already: %s", exc)
