"""Shared fixtures. Nothing may reach a model hub."""

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The same examples in every run, however long one takes: a change isn't refused for what another run's luck found.
# LAYERTAP_EXPLORE=1 tries new ones.
settings.register_profile(
    "layertap",
    deadline=None,
    derandomize=not os.environ.get("LAYERTAP_EXPLORE"),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("layertap")


@pytest.fixture(autouse=True, scope="session")
def spot_checks_come_by_count_and_not_by_chance():
    """An engine's first spot check is its thousandth sequence, unless a test asks for more of them.

    By chance, it was one of the few sequences of some test, which then counted a pass too many.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("layertap.engines.transformers.spot_check.randrange", lambda one_in: one_in - 1)
        yield
