"""Installed but not configured: the plugin changes nothing in vLLM. Each case in a fresh interpreter."""

import json
import os
import subprocess
import sys

import checkpoints
import pytest

_SNAPSHOT = """
import json, sys
import vllm
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.worker_base import WorkerWrapperBase

def owner(function):
    return function.__module__ if not hasattr(function, "__wrapped__") else "wrapped by " + function.__code__.co_filename

def patched():
    found = {
        "init_device": owner(WorkerWrapperBase.init_device),
        "compute_hash": owner(VllmConfig.compute_hash),
        "get_computed_blocks": owner(KVCacheManager.get_computed_blocks),
        "process_inputs": owner(InputProcessor.process_inputs),
    }
    return {name: where for name, where in found.items() if "layertap" in where}
"""


def run(code, **environment):
    env = {name: value for name, value in os.environ.items() if name != "LAYERTAP_VLLM_ACTIVE"}
    done = subprocess.run(
        [sys.executable, "-c", _SNAPSHOT + code],
        env={**env, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_installed_but_not_configured_it_patches_nothing():
    found = run("""
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
print(json.dumps({
    "known": "HiddenStatesConnector" in KVConnectorFactory._registry,
    "patched": patched(),
    "loaded": sorted(name for name in sys.modules if name.startswith("layertap.engines.vllm.")),
}))
""")
    assert found == {"known": True, "patched": {}, "loaded": ["layertap.engines.vllm.plugin"]}


_EVERYTHING = """
import importlib

for name in (
    "vllm.engine.arg_utils", "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.engine.input_processor",
    "vllm.v1.engine.llm_engine", "vllm.v1.executor.abstract", "vllm.v1.core.sched.scheduler", "vllm.v1.worker.worker_base",
    "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner", "vllm.v1.worker.gpu_model_runner",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", "vllm.plugins",
):
    importlib.import_module(name)

def everything():
    found = {}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("vllm.") or not hasattr(module, "__dict__"):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == module_name:
                for inner, part in list(vars(value).items()):
                    if callable(part) or isinstance(part, (staticmethod, classmethod, property)):
                        found[f"{module_name}.{name}.{inner}"] = part
            elif callable(value):
                found[f"{module_name}.{name}"] = value
    return found

before = everything()

def changed():
    after = everything()
    return sorted(
        name for name, part in before.items() if after.get(name) is not part and not name.endswith(".__abstractmethods__")
    )
"""


def test_installed_but_not_configured_no_function_of_vllm_is_another_one_afterwards(checkpoint_folder):
    path = checkpoints.save("llama", checkpoint_folder)
    found = run(
        _EVERYTHING
        + f"""
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
def configure(**options):
    return EngineArgs(model={str(path)!r}, dtype="float32", max_model_len=256, enforce_eager=True, **options).create_engine_config()
configure()
configure(kv_transfer_config=KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"))
idle = changed()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
KVConnectorFactory.get_connector_class(KVTransferConfig(kv_connector="HiddenStatesConnector", kv_role="kv_producer"))
print(json.dumps({{"looked at": len(before), "idle": idle, "configured": changed()}}))
"""
    )
    assert found["looked at"] > 5000
    assert found["idle"] == []
    # the comparison does see what is patched where the connector is configured, and there is no more of it
    assert found["configured"] == [
        "vllm.config.vllm.VllmConfig.compute_hash",
        "vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks",
        "vllm.v1.core.kv_cache_manager.KVCacheManager.reset_prefix_cache",
        "vllm.v1.core.sched.scheduler.Scheduler.__init__",
        "vllm.v1.engine.core.EngineCore.preprocess_add_request",
        "vllm.v1.engine.input_processor.InputProcessor.process_inputs",
        "vllm.v1.executor.abstract.Executor.__init__",
        "vllm.v1.executor.abstract.Executor.get_class",
        "vllm.v1.worker.worker_base.WorkerWrapperBase.init_device",
    ]


def test_naming_the_connector_activates_it():
    found = run("""
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
config = KVTransferConfig(kv_connector="HiddenStatesConnector", kv_role="kv_producer")
connector = KVConnectorFactory.get_connector_class(config)
first = patched()
from layertap.engines.vllm import activate, plugin
activate.activate()
plugin.register()
print(json.dumps({
    "patched": sorted(first), "twice": patched() == first, "hma": KVConnectorFactory.supports_hma_config(config),
    "piecewise": connector.requires_piecewise_for_cudagraph({}),
}))
""")
    assert found == {
        "patched": ["compute_hash", "get_computed_blocks", "init_device", "process_inputs"],
        "twice": True,
        "hma": True,
        "piecewise": False,
    }


def test_a_child_of_a_configured_process_activates_itself():
    found = run(
        """
from vllm.plugins import load_general_plugins
load_general_plugins()
print(json.dumps(sorted(patched())))
""",
        LAYERTAP_VLLM_ACTIVE="1",
    )
    assert found == ["compute_hash", "get_computed_blocks", "init_device", "process_inputs"]


def test_registering_never_raises(monkeypatch):
    from layertap.engines.vllm import plugin

    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    plugin.register()


@pytest.mark.parametrize("found", ["0.25.9", "0.34.0", "1.0", "main"])
def test_a_vllm_outside_of_the_tried_range_is_refused_with_the_range(monkeypatch, found):
    from layertap.engines.vllm import compat
    from layertap.errors import EngineError

    monkeypatch.setattr(compat, "version", lambda: found)
    with pytest.raises(EngineError, match=r"0\.26 up to, not including, 0\.34; found"):
        compat.check_version()


@pytest.mark.parametrize("found", ["0.26.0", "0.32.0", "0.29.1+cu130"])
def test_a_vllm_inside_of_the_range_is_taken(monkeypatch, found):
    from layertap.engines.vllm import compat

    monkeypatch.setattr(compat, "version", lambda: found)
    compat.check_version()
