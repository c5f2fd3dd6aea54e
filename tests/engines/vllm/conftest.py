"""Engines that the tests of this folder share: vLLM takes about 20 seconds to start."""

import importlib.util
from pathlib import Path

import pytest

# Plain logic, without vLLM.
_WITHOUT_VLLM = {
    "test_arena.py",
    "test_bank.py",
    "test_idle.py",
    "test_private.py",
    "test_remote.py",
    "test_stages.py",
    "test_tap.py",
    "test_ops.py",
    "test_rowmap.py",
    "test_side.py",
    "test_orders.py",
    "test_prefix_index.py",
    "test_prefix_plan.py",
    "test_unpack.py",
    "test_residual.py",
}

if importlib.util.find_spec("vllm") is None:
    folder = Path(__file__).parent
    collect_ignore = [path.name for path in folder.glob("test_*.py") if path.name not in _WITHOUT_VLLM]
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
