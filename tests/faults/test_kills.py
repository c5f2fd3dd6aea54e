"""A few kills of each kind; `python tests/faults/kills.py` does 1,000, figures in docs/trust.md."""

import kill_job
import kill_reader
import kill_server
import kill_writer
import pytest


def test_a_writer_killed_at_random_moments_leaves_only_complete_files_or_reasons():
    figures = kill_writer.run(rounds=50, seed=1)
    assert figures.faultless, figures
    assert figures.rounds == 50
    assert figures.complete > 0, figures
    assert figures.told > 0, figures


def test_killed_readers_disturb_neither_other_readers_nor_the_next_writer():
    figures = kill_reader.run(rounds=30, seed=1)
    assert figures.faultless, figures
    assert figures.complete == figures.admitted == 60


@pytest.mark.slow
def test_killed_extract_jobs_lose_nothing_that_was_there_and_the_next_run_finishes():
    figures = kill_job.run(rounds=6, seed=1)
    assert figures.faultless, figures
    assert figures.complete > 0, figures


@pytest.mark.slow
def test_every_path_that_a_killed_server_gave_out_is_a_right_file_or_a_reason():
    figures = kill_server.run_server_kills(rounds=6, seed=2)
    assert figures.faultless, figures
    assert figures.complete > 0, figures


@pytest.mark.slow
def test_a_server_survives_killed_clients_and_keeps_nothing_of_them():
    figures = kill_server.run_client_kills(rounds=10, seed=2)
    assert figures.faultless, figures
    assert figures.complete > 1, figures
