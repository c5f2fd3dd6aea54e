"""One model of the zoo at a time, built once for all tests that look at it."""

import pytest

from layertap.testing import zoo


def cases(names=None):
    """Parameters: the awkward ones always, the rest when slow tests run."""
    wanted = zoo.CASES if names is None else names
    return [pytest.param(name, marks=() if name in zoo.AWKWARD else pytest.mark.slow) for name in wanted]


def pytest_generate_tests(metafunc):
    if "case_name" in metafunc.fixturenames:
        metafunc.parametrize("case_name", cases(), scope="module")


@pytest.fixture(scope="module")
def model(case_name):
    """The model of the case. Tests leave it as they found it."""
    return zoo.build(case_name)
