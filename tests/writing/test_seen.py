"""The table of rows that were seen: the same bytes for another token are found, nothing else is."""

import multiprocessing
import os

import numpy as np

from layertap.writing.seen import SeenRows, shared_memory

ROW = np.arange(64, dtype=np.uint8)


def test_the_same_row_for_another_token_names_the_request_that_had_it():
    seen = SeenRows()
    assert seen.note(3, ROW, 5, "first") is None
    assert seen.note(3, ROW, 5, "equal") is None
    assert seen.note(4, ROW, 6, "another layer") is None
    assert seen.note(3, ROW[::-1], 6, "another row") is None
    assert seen.note(3, ROW, 6, "thief") == "equal"


def test_long_and_odd_names_are_kept_as_far_as_there_is_room():
    seen = SeenRows()
    for name in ("x" * 500, "\udc80\0", "-"):
        seen.note(1, ROW, 1, name)
        found = seen.note(1, ROW, 2, "other")
        assert found is not None
        assert found == name[:96] or name == "\udc80\0"


def test_an_entry_that_another_process_is_just_writing_counts_as_none():
    fd = shared_memory()
    one, other = SeenRows(fd), SeenRows(fd)
    one.note(3, ROW, 5, "first")
    # every single byte of it may be there before or behind the others
    whole = bytes(one._map)
    (place,) = {i // 120 for i in np.flatnonzero(np.frombuffer(whole, np.uint8)).tolist()}
    for i in range(place * 120 + 8, place * 120 + 120):
        one._map[:] = whole
        one._map[i] = whole[i] ^ 1
        assert other.note(3, ROW, 6, "second") is None
    one._map[:] = whole
    assert other.note(3, ROW, 6, "second") == "first"
    os.close(fd)


def hammer(fd, start, failures):
    seen = SeenRows(fd)
    for i in range(4000):
        # the same rows in all processes, for the same tokens: nobody may be accused
        row = np.full(16, i % 50, np.uint8)
        if seen.note(1, row, i % 50, f"process {start}, {i}") is not None:
            failures.put(i)
            return
    failures.put(None)


def test_processes_that_write_the_same_entries_accuse_nobody():
    fd = shared_memory()
    context = multiprocessing.get_context("fork")
    failures = context.Queue()
    processes = [context.Process(target=hammer, args=(fd, start, failures)) for start in range(3)]
    for process in processes:
        process.start()
    assert [failures.get(timeout=60) for _ in processes] == [None] * 3
    for process in processes:
        process.join()
    os.close(fd)
