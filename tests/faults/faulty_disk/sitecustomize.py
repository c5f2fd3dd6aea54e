"""A disk that is slow or full at random, for a process that finds this folder in its PYTHONPATH.

`LAYERTAP_TEST_DISK=slow:0.05` makes one write in twenty wait for a tenth of a second, `full:0.05` makes one in twenty fail with
ENOSPC.
"""

import errno
import os
import random
import threading

_KIND, _, _SHARE = os.environ.get("LAYERTAP_TEST_DISK", "").partition(":")
_SECONDS = 0.1
_write = os.pwrite
_never = threading.Event()


def _pwrite(fd, data, offset):
    if random.random() < float(_SHARE):
        if _KIND == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _never.wait(_SECONDS)
    return _write(fd, data, offset)


if _KIND:
    os.pwrite = _pwrite
