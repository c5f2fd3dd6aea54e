"""How much memory there is on the host."""

import contextlib
import os
from pathlib import Path

__all__ = ["memory_bytes"]

_GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes() -> int:
    """The memory of the machine, or that which this process's group (a container, say) may take."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _GROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is no such limit
            found = min(found, int(Path(name).read_text()))
    return found
