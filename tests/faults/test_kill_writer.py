from kill_writer import run


def test_a_writer_killed_at_random_moments_leaves_only_complete_files_or_reasons():
    """50 kills here; `python tests/faults/kill_writer.py` does 1,000."""
    figures = run(rounds=50, seed=1)
    assert figures.faultless, figures
    assert figures.rounds == 50
    assert figures.complete > 0, figures
    assert figures.told > 0, figures
