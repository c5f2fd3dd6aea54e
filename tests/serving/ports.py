"""Ports for servers that bind them later."""

import contextlib
import random
import socket
from pathlib import Path


def free_port():
    """A port that nobody gets by chance meanwhile: none of those that the kernel gives to connections and for port 0."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    numbers = [number for number in range(10_000, 65_536) if not first <= number <= last]
    for number in random.SystemRandom().sample(numbers, len(numbers)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", number)):
            return number
    raise AssertionError(f"no port is free outside of {first} to {last}")
