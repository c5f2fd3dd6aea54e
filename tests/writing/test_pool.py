"""Lanes keep their order, nothing handed over is lost: not when the pool closes, not when the interpreter ends."""

import subprocess
import sys
import threading
from pathlib import Path

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


def test_what_was_handed_over_is_written_although_the_script_ends_without_close(tmp_path):
    script = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1] / 'files')!r})\n"
        "from file_cases import make_recorder, make_spec, make_data\n"
        "from layertap.assembly import Rows\n"
        "from pathlib import Path\n"
        "recorder, spec = make_recorder(num_writer_threads=1), make_spec(num_rows=2000, hidden_size=512)\n"
        "data, ids = make_data(spec)\n"
        "for n in range(20):\n"
        "    capture = recorder.admit(spec, request_id=str(n), path=Path(sys.argv[1]) / f'{n}.safetensors')\n"
        "    capture.add(Rows(0, 0, ids, slice(0, 2), data))\n"
        "    capture.finish(ids, 'prefill')\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True)
    assert len(list(tmp_path.glob("*.safetensors"))) == 20


def test_a_task_refused_by_a_closing_pool_is_the_callers_own_and_no_other_is_lost():
    """Many threads submit while the pool closes: each task runs once, in the pool or (refused) with its owner."""
    for _ in range(30):
        pool = WriterPool(2)
        lane, ran, lock = pool.lane(), [], threading.Lock()

        def work(number, lane=lane, ran=ran, lock=lock):
            def task():
                with lock:
                    ran.append(number)

            try:
                lane.submit(task)
            except RuntimeError:
                task()

        threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
        for thread in threads[:8]:
            thread.start()
        closer = threading.Thread(target=pool.close)
        closer.start()
        for thread in threads[8:]:
            thread.start()
        for thread in (*threads, closer):
            thread.join()
        assert sorted(ran) == list(range(16))


def test_a_forked_child_ends_although_a_lock_of_the_pool_was_held(tmp_path):
    script = (
        "import os, sys\n"
        "from layertap.writing.pool import WriterPool\n"
        "pool = WriterPool(1)\n"
        "pool.lane().submit(lambda: None)\n"
        "with pool._condition:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
