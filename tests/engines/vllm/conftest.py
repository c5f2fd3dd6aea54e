"""Engines that the tests of this folder share: vLLM takes about 20 seconds to start."""

import importlib.util

import pytest

# Plain logic, without vLLM.
_WITHOUT_VLLM = {
    "test_arena.py",
    "test_bank.py",
    "test_rowmap.py",
    "test_orders.py",
    "test_unpack.py",
    "test_residual.py",
}

if importlib.util.find_spec("vllm") is None:
    collect_ignore = [
        "test_requests.py",
        "test_engine.py",
        "test_speculation.py",
        "test_plugin.py",
        "test_parallel.py",
        "test_faults.py",
    ]
else:
    import running

    running.set_environment()


def pytest_collection_modifyitems(items):
    for item in items:
        if "engines/vllm" in str(item.path) and item.path.name not in _WITHOUT_VLLM:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")
