"""Which cached blocks have their rows on the host: the index of the store, kept by the scheduler's process.

The rows themselves lie where they arrive, in the workers' slots (`prefix_rows`). Everything is decided here, and what was decided
reaches the workers in the order of the steps; so this side knows what is there without asking.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Entry:
    slots: dict[int, int] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    pins: int = 0


class PrefixIndex:
    """Blocks by hash, each with a slot for every layer that is kept; the least recently used go first.

    A slot is reserved when the first row of its block is computed and ready when the last one is. What is pinned stays.

    Args:
        num_slots: slots that there are.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.evicted = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything, pinned or not; whoever pinned must not unpin any more."""
        self._entries: dict[bytes, _Entry] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._idle_slots = 0
        self._free: list[int] = []
        self._num_touched = 0

    @property
    def used_slots(self) -> int:
        """Slots that are reserved or ready."""
        return self._num_touched - len(self._free)

    def has(self, key: bytes, layers: Collection[int]) -> bool:
        """Whether all these layers of the block are ready."""
        entry = self._entries.get(key)
        return entry is not None and entry.ready.issuperset(layers)

    def slots(self, key: bytes, layers: Sequence[int]) -> tuple[int, ...]:
        """Where these layers of the block are; they must be ready."""
        slots = self._entries[key].slots
        return tuple(slots[layer] for layer in layers)

    def pin(self, key: bytes) -> None:
        """Keep a block, there or to come, until it is unpinned as often."""
        entry = self._entries.setdefault(key, _Entry())
        if key in self._idle:
            del self._idle[key]
            self._idle_slots -= len(entry.slots)
        entry.pins += 1

    def unpin(self, key: bytes) -> None:
        """Undo one `pin`; the block is now the most recently used."""
        entry = self._entries[key]
        entry.pins -= 1
        if entry.pins:
            return
        if entry.slots:
            self._idle[key] = None
            self._idle_slots += len(entry.slots)
        else:
            del self._entries[key]

    def reserve(self, key: bytes, layers: Iterable[int]) -> dict[int, int]:
        """Reserve slots of a pinned block for those layers that have none; an empty dict where there is no room."""
        entry = self._entries[key]
        missing = [layer for layer in layers if layer not in entry.slots]
        if not self._make_room(len(missing)):
            return {}
        got = {layer: self._new_slot() for layer in missing}
        entry.slots |= got
        return got

    def seal(self, key: bytes, layers: Iterable[int]) -> None:
        """All rows of these layers were computed."""
        self._entries[key].ready.update(layers)

    def cancel(self, key: bytes, layers: Iterable[int]) -> None:
        """These layers of a pinned block, reserved but not ready, won't come."""
        entry = self._entries[key]
        self._free += [entry.slots.pop(layer) for layer in layers]

    def _make_room(self, count: int) -> bool:
        unused = self.num_slots - self.used_slots
        if unused + self._idle_slots < count:
            return False
        while unused < count:
            key, _ = self._idle.popitem(last=False)
            slots = self._entries.pop(key).slots
            self._idle_slots -= len(slots)
            self._free += slots.values()
            unused += len(slots)
            self.evicted += 1
        return True

    def _new_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_touched += 1
        return self._num_touched - 1
