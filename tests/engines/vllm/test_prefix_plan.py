"""Plan and slots against a simulated scheduler: whatever is shared, chunked, preempted, evicted or reset, all owed rows arrive, and
are those of the request's own tokens.
"""

import hashlib
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.capture.request import CaptureSpec, Window
from layertap.engines.vllm.messages import Fill, Reuse
from layertap.engines.vllm.prefix_plan import PrefixPlan, Scheduled
from layertap.engines.vllm.prefix_rows import PrefixRows, slot_bytes

BLOCK = 4
CELL = 8
SERVED = (0, 1, 2)


def digest(tokens):
    return hashlib.sha256(bytes(tokens)).digest()


def row(tokens, position, layer):
    """The row of a layer: it depends on all tokens so far, as a causal model's does."""
    return np.frombuffer(digest([*tokens[: position + 1], layer]), np.uint8)[:CELL]


@dataclass
class Request:
    name: str
    tokens: list
    spec: CaptureSpec
    computed: int = 0
    fresh: bool = True
    rows: dict = field(default_factory=dict)

    @property
    def block_hashes(self):
        return [digest(self.tokens[: stop + BLOCK]) for stop in range(0, len(self.tokens) - BLOCK + 1, BLOCK)]

    @property
    def num_prompt_tokens(self):
        return self.spec.prompt_len


class Engine:
    """A scheduler with a prefix cache that never evicts by itself, and one worker."""

    def __init__(self, num_slots):
        limit = num_slots * slot_bytes(BLOCK, CELL)
        self.plan = PrefixPlan(limit, CELL)
        self.plan.set_block_size(BLOCK)
        self.slots = None
        self.cached = set()
        self.requests = {}
        self.reused = 0
        self.limit = limit

    def add(self, request):
        self.requests[request.name] = request
        self.plan.admit(request.name, request, request.spec)

    def hit(self, request):
        readable = self.plan.readable(request.name)
        longest = len(request.tokens) - 1 if readable is None else min(readable, len(request.tokens) - 1)
        found = 0
        while found + BLOCK <= longest and request.block_hashes[found // BLOCK] in self.cached:
            found += BLOCK
        return found

    def step(self, chunks):
        """Run `count` tokens of each request of `chunks`."""
        scheduled = []
        for name, count in chunks:
            request = self.requests[name]
            if request.fresh:
                request.computed = self.hit(request)
            count = min(count, len(request.tokens) - request.computed)
            scheduled.append(Scheduled(name, request.computed, count, request.fresh))
            request.fresh = False
        for one in scheduled:  # vLLM's cache knows a block as soon as it is scheduled
            self.cached.update(self.requests[one.request_id].block_hashes[: (one.computed + one.count) // BLOCK])
        news = self.plan.plan(scheduled)
        assert self.plan.counts()["prefix_bytes"] <= self.limit
        if news is not None and self.slots is None:
            self.slots = PrefixRows(news.num_slots, news.block_size, news.cell_bytes)
        for fill in () if news is None else news.fills:
            self.slots.begin(fill, self.requests[fill.request_id].spec.layers)
        for one in scheduled:
            self.compute(self.requests[one.request_id], one.computed, one.count)
        for reuse in () if news is None else news.reuses:
            self.deliver(self.requests[reuse.request_id], reuse)

    def compute(self, request, computed, count):
        positions = range(computed, computed + count)
        layers, owed = request.spec.layers, request.spec.candidates
        wanted = [position for position in positions if position in owed]
        if wanted:
            data = np.array([[row(request.tokens, p, layer) for layer in layers] for p in wanted])
            if self.slots is not None:
                self.slots.put(request.name, wanted[0], np.array([request.tokens[p] for p in wanted]), data)
            request.rows.update(zip(wanted, data, strict=True))
        request.computed += count

    def deliver(self, request, reuse):
        for start, ids, data in self.slots.take(reuse, range(len(request.spec.layers))):
            assert ids.tolist() == request.tokens[start : start + len(ids)]
            request.rows.update(zip(range(start, start + len(ids)), data, strict=True))
            self.reused += len(ids)

    def end(self, name):
        self.plan.finish(name)
        if self.slots is not None:
            self.slots.forget(name)
        return self.requests.pop(name)


def spec(layers, length, positions=None, max_tokens=0):
    window = Window(positions=positions, include_output=max_tokens > 0)
    return CaptureSpec(
        layers=layers, dtype="float32", hidden_size=2, prompt_len=length, max_tokens=max_tokens, window=window
    )


def check(request):
    owed = request.spec.window.owed(request.spec.prompt_len, len(request.tokens))
    for position in owed:
        wanted = [row(request.tokens, position, layer) for layer in request.spec.layers]
        assert np.array_equal(request.rows[position], wanted), (request.name, position)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_every_owed_row_arrives_and_is_of_the_requests_own_tokens(data):
    engine = Engine(data.draw(st.integers(1, 24), label="slots"))
    words = [[1, 1, 2, 3], [4, 4, 4, 4], [5, 6, 7, 8]]
    made = 0
    for _ in range(data.draw(st.integers(4, 30), label="steps")):
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "preempt", "end", "reset", "evict"]))
        names = sorted(engine.requests)
        if action == "add":
            words_taken = data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=5))
            tokens = [*itertools.chain(*words_taken), *data.draw(st.lists(st.integers(9, 10), max_size=3))]
            layers = tuple(data.draw(st.lists(st.sampled_from(SERVED), unique=True, min_size=1)))
            positions = data.draw(st.sampled_from([None, "last", (len(tokens) // 3, len(tokens))]))
            made += 1
            engine.add(Request(f"r{made}", list(tokens), spec(layers, len(tokens), positions, max_tokens=6)))
        elif action == "step" and names:
            chosen = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
            chosen = [name for name in chosen if engine.requests[name].computed < len(engine.requests[name].tokens)]
            engine.step([(name, data.draw(st.integers(1, 9))) for name in chosen])
            for name in chosen:
                request = engine.requests[name]
                room = request.spec.prompt_len + 6 - len(request.tokens)
                if request.computed == len(request.tokens) and room > 0:
                    request.tokens.append(data.draw(st.integers(1, 3)))
        elif action == "preempt" and names:
            request = engine.requests[data.draw(st.sampled_from(names))]
            request.computed, request.fresh = 0, True
        elif action == "end" and names:
            name = data.draw(st.sampled_from(names))
            if (
                engine.requests[name].computed + 1
                >= len(engine.requests[name].tokens)
                > engine.requests[name].spec.prompt_len
            ):
                check(engine.requests[name])
            engine.end(name)
        elif action == "reset":
            engine.cached.clear()
            engine.plan.reset()
        elif action == "evict" and engine.cached:
            engine.cached.discard(data.draw(st.sampled_from(sorted(engine.cached))))
    for request in list(engine.requests.values()):
        while request.computed + 1 < len(request.tokens) or len(request.tokens) == request.spec.prompt_len:
            engine.step([(request.name, 5)])
            if request.computed == len(request.tokens):
                request.tokens.append(1)
        check(engine.end(request.name))


def run(engine, name, tokens, layers=(0, 1, 2), positions=None, chunk=100):
    engine.add(Request(name, tokens, spec(layers, len(tokens), positions)))
    before = engine.reused
    computed = 0
    request = engine.requests[name]
    while request.fresh or request.computed < len(tokens):
        was = 0 if request.fresh else request.computed
        engine.step([(name, chunk)])
        computed += request.computed - was
    check(engine.end(name))
    return engine.reused - before


def test_a_second_request_reads_what_the_first_one_kept():
    engine = Engine(100)
    assert run(engine, "a", list(range(20)), chunk=6) == 0
    assert run(engine, "b", [*range(12), 99, 98, 97]) == 12
    assert engine.plan.counts()["prefix_hits"] == 12


def test_a_subset_of_the_kept_layers_is_enough_and_other_layers_are_not():
    engine = Engine(100)
    run(engine, "a", list(range(20)), layers=(2, 0))
    assert run(engine, "b", list(range(20)), layers=(0,)) == 16
    assert run(engine, "c", list(range(20)), layers=(1, 0)) == 0
    assert run(engine, "d", list(range(20)), layers=(0, 1, 2)) == 16  # c kept the layer that was missing


def test_blocks_before_the_owed_positions_need_no_rows():
    engine = Engine(100)
    engine.cached.update(digest(range(stop)) for stop in (4, 8, 12, 16))
    engine.add(Request("a", list(range(20)), spec((1,), 20, (10, 20))))
    engine.step([("a", 100)])
    assert sorted(engine.requests["a"].rows) == list(range(8, 20))[2:]
    check(engine.end("a"))


def test_a_store_smaller_than_a_prompt_keeps_its_beginning():
    engine = Engine(2)
    run(engine, "a", list(range(20)), layers=(1,))
    assert run(engine, "b", list(range(20)), layers=(1,)) == 8


def test_rows_that_were_lost_are_noticed_where_they_are_asked_for():
    slots = PrefixRows(2, BLOCK, CELL)
    slots.begin(Fill(request_id="a", start=0, slots=((0, 0), (1, 1))), [0, 1])
    slots.put("a", 0, np.arange(3), np.zeros((3, 2, CELL), np.uint8))
    reuse = Reuse(request_id="b", start=0, stop=4, slots=((0, 1),))
    with pytest.raises(LookupError, match="lost"):
        list(slots.take(reuse, [0, 1]))
    slots.put("a", 3, np.arange(3, 4), np.zeros((1, 2, CELL), np.uint8))
    assert [(start, ids.tolist()) for start, ids, _ in slots.take(reuse, [0, 1])] == [(0, [0, 1, 2, 3])]


def test_a_slot_that_went_to_another_block_takes_no_rows_of_the_first():
    slots = PrefixRows(1, BLOCK, CELL)
    slots.begin(Fill(request_id="a", start=0, slots=((0, 0),)), [0])
    slots.put("a", 0, np.arange(2), np.zeros((2, 1, CELL), np.uint8))
    slots.begin(Fill(request_id="b", start=8, slots=((0, 0),)), [0])
    slots.put("a", 2, np.arange(2, 4), np.ones((2, 1, CELL), np.uint8))
    with pytest.raises(LookupError):
        list(slots.take(Reuse(request_id="c", start=0, stop=4, slots=((0,),)), [0]))
