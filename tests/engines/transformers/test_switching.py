"""The interpreter's switch interval while something extracts."""

import sys

from layertap.engines.transformers.switching import QuickSwitches


def test_extractions_that_overlap_put_the_switch_interval_back():
    before = sys.getswitchinterval()
    quick = QuickSwitches()
    with quick.here():
        with quick.here():
            assert sys.getswitchinterval() < before
        assert sys.getswitchinterval() < before  # the other one still runs
    assert sys.getswitchinterval() == before
