"""Shared fixtures. Nothing may reach a model hub."""

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# how long an example takes says nothing on a machine that others use, too
settings.register_profile("layertap", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("layertap")
