"""Numbers of ranges against plain ranges."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layertap.engines.ranges import numbers


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 20)), min_size=1))
def test_they_are_those_of_the_ranges_one_after_the_other(ranges):
    begins, counts = np.array(ranges).T
    expected = [number for begin, count in ranges for number in range(begin, begin + count)]
    assert numbers(begins, counts).tolist() == expected
