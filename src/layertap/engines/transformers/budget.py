"""How much device memory goes where, and how many tokens a forward must have to hide the copies of streamed weights.

A forward of T tokens computes for T * seconds_per_token in each block and copies the streamed share of the blocks. Copies are
hidden when

    T >= share * seconds_per_copy / seconds_per_token        (share: streamed blocks / blocks)

For a dense model that is share * itemsize / 2 * (FLOP/s of the matrix products) / (bytes/s of the copies), whatever its size: a
token takes 2 FLOP a parameter, a parameter is `itemsize` bytes. Both times are measured on the device.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layertap.engines.transformers.offload import SLOTS, Streamer
from layertap.engines.transformers.packing import Way
from layertap.engines.transformers.passes import Passes
from layertap.errors import OptionError
from layertap.memory import memory_bytes

__all__ = [
    "ARENAS",
    "RESERVE",
    "Costs",
    "Plan",
    "arena_bytes",
    "device_room",
    "fits",
    "make_plan",
    "measure",
    "parse_memory",
]

logger = logging.getLogger(__name__)

ARENAS = 6
"""One that is computed, one on its way to the host, four that are written: a file is written by one thread, and an arena is free
when the longest of its files is."""
_ARENA_BYTES = 2 * 2**30
_ARENA_SHARE = 32
RESERVE = 16
"""One part in so many of the device's memory is for what nobody counted."""
_WORKING_SHARE = 8
_MARGIN = 1.25
"""More tokens than hide the copies: compiled blocks, which come later, are faster than those that were measured."""
_STEP = 1024
_MOST_TOKENS = 131_072
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What was measured on a device.

    Attributes:
        seconds_per_token: of one block.
        seconds_per_copy: of the weights of one block.
        bytes_per_token: device memory that a forward takes beside weights.
    """

    seconds_per_token: float
    seconds_per_copy: float
    bytes_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model runs whose weights don't fit.

    Attributes:
        tokens: of a forward.
        resident: blocks that stay on the device.
        needed: tokens that hide the copies of the others.
    """

    tokens: int
    resident: int
    needed: int


def parse_memory(value: int | str | None) -> int | None:
    """Read `max_memory`: bytes, or text such as "24GiB" or "500 MB".

    Raises:
        OptionError: it is no size.
    """
    if value is None:
        return None
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", str(value), re.IGNORECASE)
    size = int(float(found[1]) * _UNITS.get(found[2].lower(), 0)) if found else 0
    if isinstance(value, bool) or size <= 0:
        raise OptionError(f"max_memory: expected a size such as '24GiB', or bytes, got {value!r}")
    return size


def device_room(device: torch.device, max_memory: int | None) -> int | None:
    """Device memory that the model may take with all that it needs to run; None is any amount."""
    if device.type != "cuda":
        if max_memory is not None:
            logger.warning("max_memory on a %s only moves weights within the same memory", device.type)
        return max_memory
    device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info(device)
    own_free = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    room = min(free + own_free, int(share * total) - torch.cuda.memory_allocated(device))
    return room if max_memory is None else min(room, max_memory)


def fits(weight_bytes: int, room: int | None) -> bool:
    """Whether all weights can stay on the device; an eighth of the room is for the work."""
    return room is None or weight_bytes + room // _WORKING_SHARE <= room


def arena_bytes(room: int | None) -> int:
    """Most memory of one batch's rows, which they take on the device and, pinned, on the host.

    All of them together stay below a fifth of the device's room and a quarter of the host's memory.
    """
    limits = [_ARENA_BYTES, memory_bytes() // (4 * ARENAS)]
    return min(limits) if room is None else min(*limits, room // _ARENA_SHARE)


def make_plan(costs: Costs, *, num_blocks: int, block_bytes: int, room: int, tokens: int, fixed: bool = False) -> Plan:
    """Choose the tokens of a forward and how many blocks stay on the device: what one takes, the other lacks.

    Args:
        costs: as measured.
        num_blocks: that the forward runs.
        block_bytes: of each.
        room: device memory for both.
        tokens: to begin with; more if the copies need more to hide behind, less if the memory is too small.
        fixed: exactly these tokens.

    Returns:
        The plan with the fewest tokens of those that hide the largest part of the copies.
    """
    best: tuple[float, Plan] | None = None
    largest = int(max(_STEP, min(_MOST_TOKENS, room / max(costs.bytes_per_token, 1))))
    first = tokens if fixed else min(tokens, largest // _STEP * _STEP or largest)
    for number in [first] if fixed else range(first, max(largest, first) + 1, _STEP):
        resident = _resident(int(max(0.0, room - number * costs.bytes_per_token) // block_bytes), num_blocks)
        needed = _needed(costs, (num_blocks - resident) / num_blocks)
        hidden = min(1.0, number / (_MARGIN * needed)) if needed else 1.0
        if best is None or hidden > best[0]:
            best = (hidden, Plan(tokens=number, resident=resident, needed=needed))
    assert best is not None
    return best[1]


def _resident(count: int, num_blocks: int) -> int:
    """Blocks that stay: with one streamed block too many for rounds of the buffers, each forward would begin with a wait."""
    count = min(count, num_blocks)
    return count - 1 if count and num_blocks - count > SLOTS and (num_blocks - count) % SLOTS == 1 else count


def _needed(costs: Costs, share: float) -> int:
    return int(share * costs.seconds_per_copy / max(costs.seconds_per_token, 1e-12))


def measure(passes: Passes, streamer: Streamer, way: Way, depth: int, longest: int) -> Costs:
    """Run a few prompts through the first blocks and copy one block: what a token costs, and what a copy.

    Args:
        passes: of the model.
        streamer: of its blocks, with none of them resident.
        way: how sequences share a forward.
        depth: blocks that are loaded.
        longest: most tokens of a sequence.
    """
    blocks = min(depth, SLOTS)
    length = min(longest, 512)
    sequences = [[1 + i % 100 for i in range(length)]] * (1 if way == "alone" else max(1, 4096 // length))
    tokens = length * len(sequences)
    wanted = [range(length - 1, length)] * len(sequences)
    device = streamer.device
    rows = torch.empty(
        len(sequences), 1, passes.layout.hidden_size, dtype=next(passes.model.parameters()).dtype, device=device
    )
    is_cuda = device.type == "cuda"

    def run(layer: int) -> float:
        if is_cuda:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        passes.run(way, sequences, wanted, [layer], rows)
        if is_cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    def best(layer: int, times: Sequence[int] = range(3)) -> float:
        return min(run(layer) for _ in times)

    bytes_per_token = 0.0
    run(blocks)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run(blocks)
        bytes_per_token = 1.1 * (torch.cuda.max_memory_allocated(device) - before) / tokens
    seconds = max(best(blocks) - best(0), 1e-9) if blocks else 1e-9
    return Costs(
        seconds_per_token=seconds / max(blocks, 1) / tokens,
        seconds_per_copy=streamer.seconds_per_copy(),
        bytes_per_token=bytes_per_token,
    )
