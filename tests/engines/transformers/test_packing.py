"""Batches: every sequence once, within the budget, the oldest first, nothing pulled before it is wanted."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.engines.transformers.packing import Batch, Item, Packer, Way

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=200)
ways = st.sampled_from(["packed", "padded", "alone"])


def batches(items, packer):
    """Pull items only as far as the look-ahead wants them, as extraction does."""
    for item in items:
        packer.push(item)
        while packer.full:
            yield packer.pop()
    while len(packer):
        yield packer.pop()


def plan(all_lengths: list[int], way: Way, budget: int, max_together: int | None = None) -> list[Batch[int]]:
    items = (Item(i, length, length % 3 == 0) for i, length in enumerate(all_lengths))
    return list(batches(items, Packer(way, budget, max_together)))


@given(lengths, ways, st.integers(8, 400), st.none() | st.integers(1, 300))
def test_every_sequence_runs_exactly_once(all_lengths, way, budget, max_together):
    done = [item.value for batch in plan(all_lengths, way, budget, max_together) for item in batch.items]
    assert sorted(done) == list(range(len(all_lengths)))


@given(lengths, ways, st.integers(8, 400), st.none() | st.integers(1, 300))
def test_only_a_sequence_that_is_too_long_exceeds_the_budget_and_it_runs_by_itself(
    all_lengths, way, budget, max_together
):
    for batch in plan(all_lengths, way, budget, max_together):
        longest = max(item.length for item in batch.items)
        cost = longest * len(batch.items) if way == "padded" else batch.tokens
        if len(batch.items) > 1:
            assert cost <= budget
            assert max_together is None or longest <= max_together
        assert way != "alone" or len(batch.items) == 1


@given(lengths, ways, st.integers(8, 400))
def test_only_equal_groups_run_together(all_lengths, way, budget):
    for batch in plan(all_lengths, way, budget):
        assert len({item.group for item in batch.items}) == 1


@given(lengths, ways, st.integers(8, 400))
def test_each_batch_holds_the_sequence_that_waited_longest(all_lengths, way, budget):
    waiting = set(range(len(all_lengths)))
    for batch in plan(all_lengths, way, budget):
        values = {item.value for item in batch.items}
        assert min(waiting) in values
        waiting -= values


@given(st.lists(st.integers(1, 64), min_size=50, max_size=300))
def test_packed_batches_are_nearly_full(all_lengths):
    packed = list(batches((Item(i, n) for i, n in enumerate(all_lengths)), Packer("packed", 256)))
    for batch in packed[:-4]:  # the last ones take what is left
        assert batch.tokens > 256 - 64


@given(st.lists(st.integers(1, 200), min_size=1, max_size=200))
def test_padding_is_at_most_a_quarter(all_lengths):
    for batch in plan(all_lengths, "padded", 1000):
        area = max(item.length for item in batch.items) * len(batch.items)
        assert area - batch.tokens <= area / 4


@pytest.mark.parametrize("way", ["packed", "padded", "alone"])
def test_no_more_is_pulled_than_the_look_ahead_wants(way):
    pulled = 0

    def endless() -> Iterator[Item[int]]:
        nonlocal pulled
        while True:
            pulled += 1
            yield Item(pulled, 10)

    stream = batches(endless(), Packer(way, 100))
    for _ in range(3):
        next(stream)
    assert pulled <= 4 * 100 // 10 + 3 * 10


def test_a_lone_sequence_of_a_packable_model_still_goes_the_packed_way():
    (batch,) = plan([5], "packed", 100)
    assert batch.way == "packed"


def test_a_sequence_longer_than_may_run_together_goes_alone_between_others():
    ways = {tuple(item.value for item in batch.items): batch.way for batch in plan([4, 50, 8], "padded", 100, 20)}
    assert ways[(1,)] == "alone"


def test_a_packable_model_runs_what_the_self_test_does_not_vouch_for_with_its_own_attention():
    ways = {batch.items[0].length: batch.way for batch in plan([30, 12], "packed", 10, 20)}
    assert ways == {30: "alone", 12: "packed"}


@given(lengths, st.sampled_from(["packed", "padded", "alone"]), st.integers(8, 400))
def test_at_the_end_the_longest_go_first(all_lengths, way, budget):
    packer = Packer(way, budget)
    for i, length in enumerate(all_lengths):
        packer.push(Item(i, length))
    packer.longest_first()
    longest, done = [], []
    while len(packer):
        items = packer.pop().items
        longest.append(max(item.length for item in items))
        done += [item.value for item in items]
    assert longest == sorted(longest, reverse=True)
    assert sorted(done) == list(range(len(all_lengths)))


def test_shared_batches_keep_the_order_in_which_beginnings_are_common():
    packer = Packer("shared", 400)
    for i, length in enumerate((3, 9, 5)):
        packer.push(Item(i, length))
    packer.longest_first()
    assert [item.value for item in packer.pop().items] == [0, 1, 2]


@pytest.mark.parametrize(("first", "later", "sequences"), [(400, 100, 80), (100, 400, 80), (400, 400, 80)])
def test_a_budget_that_changes_leaves_enough_to_choose_from(first, later, sequences):
    packer = Packer("packed", first)
    packer.budget = later
    count = 0
    while not packer.full:
        packer.push(Item(count, 20))
        count += 1
    assert count == sequences
    assert packer.pop().tokens == later
