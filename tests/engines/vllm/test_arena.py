"""The ring of cells: spans never overlap, room comes back in any order, waiting makes progress."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.engines.vllm.arena import Ring


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 100)), max_size=80))
def test_spans_that_are_out_never_overlap(actions):
    ring = Ring(30)
    out = []
    for take, size, which in actions:
        if take:
            span = ring.try_take(size)
            if span is not None:
                assert 0 <= span.start < span.stop <= 30
                assert all(span.stop <= other.start or other.stop <= span.start for other in out)
                out.append(span)
        elif out:
            ring.give_back(out.pop(which % len(out)))
    assert ring.used == sum(span.stop - span.start for span in out)
    for span in out:
        ring.give_back(span)
    assert ring.used == 0
    assert ring.try_take(30) is not None


def test_steps_of_half_the_ring_follow_each_other_without_waiting_for_more_than_the_oldest():
    ring = Ring(20)
    running = [ring.try_take(10), ring.try_take(10)]
    for _ in range(5):  # a full step behind full steps: the oldest has been copied, the other one still runs
        assert ring.try_take(10) is None
        ring.give_back(running.pop(0))
        running.append(ring.try_take(10))
        assert running[-1] is not None


def test_a_taker_waits_until_the_oldest_span_is_back():
    ring = Ring(10)
    first, second = ring.take(6), ring.take(4)
    got = []
    thread = threading.Thread(target=lambda: got.append(ring.take(5)))
    thread.start()
    ring.give_back(second)  # not enough: the oldest is still out
    ring.give_back(first)
    thread.join(30)
    assert got
    assert got[0].stop - got[0].start == 5


def test_closing_wakes_whoever_waits():
    ring = Ring(4)
    ring.take(4)
    got = []
    thread = threading.Thread(target=lambda: got.append(ring.take(1)))
    thread.start()
    ring.close()
    thread.join(30)
    assert got == [None]


def test_more_than_the_ring_is_an_error():
    with pytest.raises(ValueError, match="don't fit"):
        Ring(4).take(5)
