"""Steps are asked for after an end, again and again with growing pauses, and only where the engine may step."""

import threading

import pytest

from layertap.engines.vllm.idle import IdleSteps


@pytest.fixture
def make():
    made = []

    def build(**options):
        made.append(IdleSteps(**options))
        return made[-1]

    yield build
    for idle in made:
        idle.close()


def test_pauses_double_until_the_last(make):
    idle, woken, done = make(first_seconds=0.01, last_seconds=0.05), [], threading.Event()

    def wake(mark):
        mark()
        woken.append(idle.wanted)
        idle.stepped()
        if len(woken) == 3:
            done.set()

    idle.connect(wake)
    idle.ended()
    assert done.wait(60)
    assert woken == [True, True, True]  # after 0.01, 0.02 and 0.04 seconds; 0.08 would be more than the last
    assert not idle.wanted


def test_each_end_begins_anew(make):
    idle, woken = make(first_seconds=0.001, last_seconds=0.001), threading.Semaphore(0)
    idle.connect(lambda mark: woken.release())
    for _ in range(3):
        idle.ended()
        assert woken.acquire(timeout=60)
    assert not woken.acquire(blocking=False)


def test_a_step_that_must_not_be_isnt_marked(make):
    idle, asked = make(first_seconds=0.001, last_seconds=0.001), threading.Event()
    idle.connect(lambda mark: asked.set())
    idle.ended()
    assert asked.wait(60)
    assert not idle.wanted


def test_where_there_is_no_loop_nothing_is_asked(make):
    idle = make(first_seconds=0.001)
    before = threading.active_count()
    idle.ended()
    assert threading.active_count() == before
    assert not idle.wanted
