"""Engines that the tests of this folder share: vLLM takes about 20 seconds to start."""

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import running

    running.set_environment()


def pytest_collection_modifyitems(items):
    for item in items:
        if "engines/vllm" in str(item.path):
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")
