"""A model of writing beside computing: what all layers of the mixed workload cost, by the memory between the two. No GPU is needed.

Run as: python benchmarks/writing_model.py [--write 1.8] [--write-hashing 1.35] [--layers 36]

The device computes one forward after the other, its copies to the host follow one another, and each file is written by one of a few
threads at a time, at a rate that was measured. What decides is when the memory of a forward is free again: when the longest of its
files is written. `extract` has a number of arenas and forwards that fit one; `vllm` has steps of 16,384 tokens of which prompts may
take part in two, and a ring of so many steps. Rates in GB/s and tok/s are those of an H200 with the Qwen3-8B shape (RESULTS.md).
Prints a table and one JSON line.
"""

import argparse
import heapq
import json
from collections import deque
from collections.abc import Callable

from workloads import mixed_lengths

from layertap.engines.transformers.packing import Item, Packer

SLOT_BYTES, STEP_TOKENS, COPY_BYTES_S = 8192, 16_384, 55e9
PER_FILE_SECONDS = 0.0005


class Writers:
    """Threads that serve lanes: tasks of one lane run one after the other, lanes beside each other."""

    def __init__(self, count: int, bytes_s: float) -> None:
        self._idle, self._bytes_s = count, bytes_s
        self._lanes: dict[int, deque] = {}
        self._ready: deque[int] = deque()
        self._running: list[tuple[float, int, int, Callable[[], None]]] = []
        self._coming: list[tuple[float, int, int, int, Callable[[], None]]] = []
        self._count = 0
        self.now = 0.0

    def submit(self, at: float, lane: int, num_bytes: int, done: Callable[[], None]) -> None:
        """From `at` on there are so many bytes to write; then `done` is called."""
        self._count += 1
        heapq.heappush(self._coming, (at, self._count, lane, num_bytes, done))

    def step(self) -> bool:
        """Go on to what happens next; False if nothing does."""
        ends = self._running[0][0] if self._running else float("inf")
        comes = self._coming[0][0] if self._coming else float("inf")
        if min(ends, comes) == float("inf"):
            return False
        self.now = max(self.now, min(ends, comes))
        if ends <= comes:
            _, _, lane, done = heapq.heappop(self._running)
            self._idle += 1
            if self._lanes[lane]:
                self._ready.append(lane)
            else:
                del self._lanes[lane]
            done()
        else:
            _, _, lane, num_bytes, done = heapq.heappop(self._coming)
            if lane not in self._lanes:
                self._lanes[lane] = deque()
                self._ready.append(lane)
            self._lanes[lane].append((num_bytes, done))
        while self._idle and self._ready:
            lane = self._ready.popleft()
            num_bytes, done = self._lanes[lane].popleft()
            self._idle -= 1
            self._count += 1
            ends = self.now + PER_FILE_SECONDS + num_bytes / self._bytes_s
            heapq.heappush(self._running, (ends, self._count, lane, done))
        return True


def packs_of(lengths: list[int], budget: int, longest_first: bool) -> list[list[tuple[int, int]]]:
    """The forwards of extraction: (prompt, tokens) each."""
    packer: Packer[int] = Packer("packed", STEP_TOKENS)
    packer.budget = budget
    found = []
    for index, length in enumerate(lengths):
        packer.push(Item(index, length))
        while packer.full:
            found.append([(item.value, item.length) for item in packer.pop().items])
    if longest_first:
        packer.longest_first()
    while len(packer):
        found.append([(item.value, item.length) for item in packer.pop().items])
    return found


def steps_of(lengths: list[int]) -> list[list[tuple[int, int]]]:
    """The steps of vLLM's chunked prefill."""
    found, current, left = [], [], STEP_TOKENS
    for index, length in enumerate(lengths):
        while length:
            taken = min(length, left)
            current.append((index, taken))
            length, left = length - taken, left - taken
            if not left:
                found.append(current)
                current, left = [], STEP_TOKENS
    return [*found, current] if current else found


def simulate(
    forwards: list[list[tuple[int, int]]], row_bytes: int, *, tok_s: float, write_bytes_s: float, memories: int
) -> tuple[float, float]:
    """tok/s until the device is done, and until the last file is; `memories` forwards may be between device and file."""
    writers = Writers(8, write_bytes_s)
    free, device, copied = memories, 0.0, 0.0

    def give_back() -> None:
        nonlocal free
        free += 1

    for forward in forwards:
        launch = 0.0
        while not free:
            assert writers.step(), "nothing would ever be free"
            launch = writers.now
        free -= 1
        tokens = sum(count for _, count in forward)
        device = max(device, launch) + tokens / tok_s
        copied = max(copied, device) + tokens * row_bytes / COPY_BYTES_S
        left = [len(forward)]

        def done(left: list[int] = left) -> None:
            left[0] -= 1
            if not left[0]:
                give_back()

        for prompt, count in forward:
            writers.submit(copied, prompt, count * row_bytes, done)
    while writers.step():
        pass
    total = sum(count for forward in forwards for _, count in forward)
    return total / device, total / writers.now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=200_480)
    parser.add_argument("--tok-s", type=float, default=42_300, help="what the device computes without files")
    parser.add_argument("--write", type=float, default=1.8, help="GB/s of one thread that writes")
    parser.add_argument("--write-hashing", type=float, default=1.35, help="GB/s of one that also hashes")
    args = parser.parse_args()
    lengths, row_bytes = mixed_lengths(args.tokens), args.layers * SLOT_BYTES
    result: dict[str, list[int]] = {}

    def show(name: str, forwards: list[list[tuple[int, int]]], write: float, memories: int) -> None:
        rates = simulate(forwards, row_bytes, tok_s=args.tok_s, write_bytes_s=write * 1e9, memories=memories)
        result[name] = [round(rate) for rate in rates]
        print(f"{name:48} {rates[0]:8,.0f} tok/s computed, {rates[1]:8,.0f} published", flush=True)

    budget = min(STEP_TOKENS, (2 << 30) // row_bytes)
    for arenas in (3, 4, 5, 6, 8):
        for longest_first in (False, True):
            order = "longest first" if longest_first else "in order"
            show(f"extract, {arenas} arenas, {order}", packs_of(lengths, budget, longest_first), args.write, arenas)
    for steps in (1, 2, 3, 4):  # room in the ring is taken once the step was launched, so one more is under way
        show(f"vllm, ring of {steps}, writers hash", steps_of(lengths), args.write_hashing, steps + 1)
        show(f"vllm, ring of {steps}, digests on the device", steps_of(lengths), args.write, steps + 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
