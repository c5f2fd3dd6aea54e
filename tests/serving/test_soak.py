"""The short form of soak.py; 30 minutes are `python tests/serving/soak.py 1800`."""

import os
import re

import pytest
import soak
from ports import free_port


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_clients_and_a_killed_server_lose_and_leave_nothing(checkpoint, tmp_path):
    seconds = float(os.environ.get("LAYERTAP_SOAK_SECONDS", "120"))
    found = soak.soak(checkpoint, seconds, tmp_path, free_port())
    assert found["exit"] == 0
    assert found["kills"] >= soak.LEAST_KILLS
    assert found["verified"] >= soak.LEAST_VERIFIED
    for name in ("wrong", "temporaries", "old", "broken", "lost", "unexplained"):
        assert found[name] == [], (name, found)
    # nobody is told that a writer died but the one that was killed
    died = {pid for error in found["errors"] for pid in re.findall(r"its writer \(process (\d+)\)", error)}
    assert died <= {str(found["killed_server"])}, found["errors"]
    # errors are those of a server that is away, and of requests that its death cut off
    away = (
        "can't be reached",
        "broke",
        "died",
        "ended before",
        "refused",
        "404",
        "Timeout",
        "ReadError",
        "ProtocolError",
    )
    unexplained = [error for error in found["errors"] if not any(word in error for word in away)]
    assert not unexplained, "\n".join(unexplained)
