"""The index of kept blocks against a model of it: never past its slots, nothing pinned goes, the least recently used go first."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from layertap.engines.vllm.prefix_index import PrefixIndex

KEYS = [bytes([number]) for number in range(7)]
LAYERS = st.lists(st.integers(0, 3), unique=True, min_size=1).map(tuple)


class Index(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index = PrefixIndex(6)
        self.pinned = []
        self.slots = {}  # (key, layer) -> slot, of what must be there
        self.ready = set()
        self.order = []  # keys by their last use

    @rule(key=st.sampled_from(KEYS))
    def pin(self, key):
        self.index.pin(key)
        self.pinned.append(key)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        key = data.draw(st.sampled_from(self.pinned))
        for layer in self.pending(key):
            self.index.cancel(key, [layer])
            del self.slots[key, layer]
        self.index.unpin(key)
        self.pinned.remove(key)
        if key not in self.pinned:
            self.order = [*(other for other in self.order if other != key), key]

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), layers=LAYERS)
    def reserve(self, data, layers):
        key = data.draw(st.sampled_from(self.pinned))
        missing = [layer for layer in layers if (key, layer) not in self.slots]
        got = self.index.reserve(key, layers)
        fixed = sum(other in self.pinned for other, _ in self.slots)
        assert sorted(got) == (sorted(missing) if fixed + len(missing) <= 6 else [])
        if got:
            self.evict(len(missing))
        self.slots |= {(key, layer): slot for layer, slot in got.items()}

    def evict(self, count):
        for key in self.order:
            if len(self.slots) + count <= 6:
                break
            if key not in self.pinned:
                self.slots = {where: slot for where, slot in self.slots.items() if where[0] != key}
                self.ready = {where for where in self.ready if where[0] != key}

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def seal(self, data):
        key = data.draw(st.sampled_from(self.pinned))
        pending = self.pending(key)
        self.index.seal(key, pending) if pending else None
        self.ready |= {(key, layer) for layer in pending}

    @rule()
    def clear(self):
        self.index.clear()
        self.pinned, self.slots, self.ready, self.order = [], {}, set(), []

    def pending(self, key):
        return [layer for other, layer in self.slots if other == key and (other, layer) not in self.ready]

    @invariant()
    def what_is_ready_is_found_in_slots_of_its_own(self):
        for key in KEYS:
            layers = [layer for layer in range(4) if (key, layer) in self.ready]
            assert self.index.has(key, layers) or not layers
            assert not any(self.index.has(key, [layer]) for layer in range(4) if layer not in layers)
            assert not layers or list(self.index.slots(key, layers)) == [self.slots[key, layer] for layer in layers]
        assert len(set(self.slots.values())) == len(self.slots) == self.index.used_slots <= 6
        assert all(0 <= slot < 6 for slot in self.slots.values())


Index.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestIndex = Index.TestCase
