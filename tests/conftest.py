"""Shared fixtures. Nothing may reach a model hub."""

import os

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
