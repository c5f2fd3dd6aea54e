import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.writing.pool import WriterPool


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_tasks_of_a_lane_keep_their_order_and_all_run(lanes_of_tasks, num_threads):
    pool = WriterPool(num_threads)
    lanes = [pool.lane() for _ in range(6)]
    ran = [[] for _ in range(6)]
    for number, lane in enumerate(lanes_of_tasks):
        lanes[lane].submit(lambda number=number, lane=lane: ran[lane].append(number))
    pool.close()
    for lane in range(6):
        assert ran[lane] == [number for number, of in enumerate(lanes_of_tasks) if of == lane]


def test_lanes_run_beside_each_other():
    pool = WriterPool(2)
    meeting = threading.Barrier(2, timeout=30)
    met = []
    for _ in range(2):
        pool.lane().submit(lambda: met.append(meeting.wait()))
    pool.close()
    assert sorted(met) == [0, 1]


def test_a_task_that_raises_does_not_take_its_thread_along():
    pool = WriterPool(1)
    lane = pool.lane()
    ran = []
    lane.submit(lambda: 1 / 0)
    lane.submit(lambda: ran.append("next"))
    pool.lane().submit(lambda: ran.append("other lane"))
    pool.close()
    assert sorted(ran) == ["next", "other lane"]


def test_a_closed_pool_refuses():
    pool = WriterPool(1)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.lane().submit(lambda: None)
