"""The host's memory, and a container's share of it."""

import pytest

from layertap import memory
from layertap.memory import memory_bytes


def test_it_is_what_the_machine_has_or_less():
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) << 10
    assert 1 << 28 < memory_bytes() <= total + (1 << 20)


@pytest.mark.parametrize(("text", "limited"), [("1048576\n", True), ("max\n", False), ("9223372036854771712\n", False)])
def test_a_limit_of_the_group_counts(tmp_path, monkeypatch, text, limited):
    monkeypatch.setattr(memory, "_GROUP_LIMITS", ())
    machine = memory_bytes()
    (tmp_path / "memory.max").write_text(text)
    monkeypatch.setattr(memory, "_GROUP_LIMITS", (str(tmp_path / "missing"), str(tmp_path / "memory.max")))
    assert memory_bytes() == (1048576 if limited else machine)
