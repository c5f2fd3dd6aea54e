"""The schedule of streamed weights, on a simulated device whose two lanes may run as unevenly as they like."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.engines.transformers.streaming import Schedule


class Device:
    """Two queues of work. Nothing runs before `run`, which then takes the next of either lane at random.

    A copy writes a slot in two halves, and a block reads its slot when it begins and when it ends, so that any overlap shows.
    """

    def __init__(self):
        self.copies, self.computing = [], []
        self.passed = set()
        self.slots = {}
        self.seen = []
        self.marks = 0
        self.copied = 0

    def _new_mark(self):
        self.marks += 1
        return self.marks

    def copy(self, block, slot, after):
        mark = self._new_mark()
        self.copied += 1
        self.copies += [
            (after, lambda: self.slots.update({slot: f"half of {block}"})),
            (None, lambda: self.slots.update({slot: block})),
            (None, lambda: self.passed.add(mark)),
        ]
        return mark

    def wait(self, mark):
        self.computing.append((mark, lambda: None))

    def mark(self):
        mark = self._new_mark()
        self.computing.append((None, lambda: self.passed.add(mark)))
        return mark

    def use(self, block, slot):
        self.computing += [(None, lambda: self.seen.append((block, self.slots.get(slot))))] * 2

    def run(self, rng):
        while self.copies or self.computing:
            ready = [
                lane
                for lane in (self.copies, self.computing)
                if lane and (lane[0][0] is None or lane[0][0] in self.passed)
            ]
            assert ready, "each lane waits for the other"
            rng.choice(ready).pop(0)[1]()


@st.composite
def forwards(draw):
    """Blocks, which of them stay on the device, slots, and some forwards: mostly in order, to various depths."""
    num_blocks = draw(st.integers(1, 9))
    streamed = sorted(draw(st.sets(st.integers(0, num_blocks - 1))))
    count = draw(st.integers(1, 4))
    slots = {block: place % count for place, block in enumerate(streamed)}
    runs = []
    for _ in range(draw(st.integers(1, 4))):
        depth = draw(st.integers(0, num_blocks))
        order = list(range(depth))
        if draw(st.integers(0, 4)) == 0:  # a model that skips blocks, repeats them, or shuffles them
            order = draw(st.lists(st.integers(0, num_blocks - 1), max_size=12))
        runs.append((depth, order, draw(st.integers(0, 12))))
    return slots, runs


@settings(max_examples=400, deadline=None)
@given(work=forwards(), seed=st.integers(0, 2**32 - 1))
def test_a_block_sees_its_own_weights_from_beginning_to_end_however_the_lanes_run(work, seed):
    slots, runs = work
    device, rng = Device(), random.Random(seed)
    schedule = Schedule(slots, device)
    expected = []
    for depth, order, broken_at in runs:
        schedule.begin(depth)
        for place, block in enumerate(order):
            schedule.enter(block)
            if block in slots:
                device.use(block, slots[block])
                expected += [(block, block)] * 2
            if place == broken_at:  # an early exit, or an error, inside of the block
                break
            schedule.leave(block)
        schedule.end()
        if rng.random() < 0.5:
            device.run(rng)
    device.run(rng)
    assert device.seen == expected


@pytest.mark.parametrize(("num_blocks", "count"), [(6, 3), (8, 3), (7, 2), (3, 3), (2, 3)])
def test_a_forward_copies_each_block_once_and_none_whose_slot_still_holds_it(num_blocks, count):
    slots = {block: block % count for block in range(num_blocks)}
    device = Device()
    schedule = Schedule(slots, device)
    for _ in range(4):
        schedule.begin(num_blocks)
        for block in range(num_blocks):
            schedule.enter(block)
            schedule.leave(block)
        schedule.end()
    assert device.copied <= 4 * num_blocks + count
    if num_blocks <= count:
        assert device.copied == num_blocks


def test_the_next_blocks_are_on_their_way_before_the_running_one_is_done():
    slots = {block: block % 3 for block in range(6)}
    device = Device()
    schedule = Schedule(slots, device)
    schedule.begin(6)
    assert device.copied == 3
    schedule.enter(0)
    schedule.leave(0)
    assert device.copied == 4
    for block in range(1, 6):
        schedule.enter(block)
        schedule.leave(block)
    assert device.copied == 6 + 3  # those with which the next forward begins
    schedule.end()
    schedule.begin(2)  # a shallow one needs no other
    assert device.copied == 9


def test_blocks_past_the_depth_of_a_forward_are_not_copied():
    device = Device()
    schedule = Schedule({block: block % 3 for block in range(9)}, device)
    for _ in range(3):
        schedule.begin(2)
        for block in (0, 1):
            schedule.enter(block)
            schedule.leave(block)
        schedule.end()
    assert device.copied == 2
