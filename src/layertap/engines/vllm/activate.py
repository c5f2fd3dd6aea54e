"""What is patched in vLLM once the connector is configured, and only then.

- `WorkerWrapperBase.init_device`: the worker's `load_model` is followed by the installation of the tap, before vLLM profiles,
  compiles or captures anything;
- `VllmConfig.compute_hash`: a compile cache that was made without the tap, or with taps elsewhere, must not be used;
- `Executor.get_class`, the first stop of a finished configuration: vLLM's documented `extract_hidden_states` configuration gives
  the layers and is then dropped, so that its dummy draft model isn't run; what can't be had is refused before anything is loaded;
- `Executor.__init__`: the same where the configuration was made for the workers of one more machine only;
- `Scheduler.__init__`: before 0.28 vLLM looks state-space models' prefixes up for a connector that loads what is missing; ours
  has no use for that;
- `EngineCore.preprocess_add_request`, at the first request: with any connector vLLM hashes every prompt's blocks, even where prefix
  caching is off, which ours has no use for either; and an idle engine is woken for its metrics. (`EngineCore.__init__` would be
  patched too late where the engine's process is spawned: it loads plugins only there);
- `KVCacheManager.get_computed_blocks` and `.reset_prefix_cache`: with `prefix_rows_bytes` a capturing request reads only those
  cached blocks whose rows are on the host (`prefix_cache`);
- `InputProcessor.process_inputs`: a bad option is refused in the front end, before anything is generated.

Each checks at run time whether the engine at hand has the connector, so other engines of the same process are untouched. Child
processes learn through the environment that they are to activate (`plugin.register` runs in each of them).
"""

import functools
import hashlib
import logging
import os
import threading
from typing import Any

from layertap.engines.vllm.plugin import ACTIVE_ENV

_lock = threading.Lock()
_active = False


def activate() -> None:
    """Patch this process. Idempotent."""
    global _active
    with _lock:
        if _active:
            return
        _active = True
        os.environ[ACTIVE_ENV] = "1"
        _log_as_vllm_does()
        _patch_worker()
        _patch_hash()
        _patch_executor()
        _patch_core()
        _patch_prefix_cache()
        _patch_front_end()


def _log_as_vllm_does() -> None:
    """Where nobody has set logging up, what layertap says goes where vLLM's lines go, in their form."""
    mine, vllms = logging.getLogger("layertap"), logging.getLogger("vllm")
    if not mine.handlers and not logging.getLogger().handlers:
        mine.setLevel(vllms.level)
        for handler in vllms.handlers:
            mine.addHandler(handler)


def is_active() -> bool:
    """Whether this process is patched."""
    return _active


def _patch_worker() -> None:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.init_device

    @functools.wraps(original)
    def init_device(self: Any) -> Any:
        result = original(self)
        from layertap.engines.vllm import worker

        worker.watch_load(self.worker)
        return result

    WorkerWrapperBase.init_device = init_device


def _patch_hash() -> None:
    from vllm.config import VllmConfig

    original = VllmConfig.compute_hash

    @functools.wraps(original)
    def compute_hash(self: Any) -> str:
        plain = str(original(self))
        from layertap import __version__
        from layertap.engines.vllm import ops
        from layertap.engines.vllm.configured import configured

        if self.model_config is None or (found := configured(self)) is None:
            return plain
        salted = f"{plain} layertap {__version__} {ops.VERSION} {found.layers}"
        return hashlib.sha256(salted.encode()).hexdigest()[: max(10, len(plain))]

    VllmConfig.compute_hash = compute_hash


def _patch_executor() -> None:
    from vllm.v1.executor.abstract import Executor

    choose, start = Executor.get_class, Executor.__init__

    @functools.wraps(choose)
    def get_class(vllm_config: Any) -> Any:
        _prepare(vllm_config)
        return choose(vllm_config)

    @functools.wraps(start)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        _prepare(vllm_config)
        start(self, vllm_config, *args, **kwargs)

    Executor.get_class = staticmethod(get_class)
    Executor.__init__ = init


def _prepare(vllm_config: Any) -> None:
    from layertap.engines.vllm import prefix_cache
    from layertap.engines.vllm.configured import prepare

    found = prepare(vllm_config)
    if found is not None:
        prefix_cache.check(vllm_config, found)


def _patch_core() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    from layertap.engines.vllm import compat

    make, take = Scheduler.__init__, EngineCore.preprocess_add_request

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if _is_ours(self.vllm_config):
            compat.look_up_as_without_connector(self)

    @functools.wraps(take)
    def preprocess_add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "layertap_met", False):
            self.layertap_met = True
            if _is_ours(self.vllm_config) and not self.vllm_config.cache_config.enable_prefix_caching:
                self.request_block_hasher = None
            _wake_for_metrics(self)
        return take(self, *args, **kwargs)

    Scheduler.__init__ = init
    EngineCore.preprocess_add_request = preprocess_add_request


def _is_ours(vllm_config: Any) -> bool:
    from layertap.engines.vllm.plugin import CONNECTOR

    return getattr(vllm_config.kv_transfer_config, "kv_connector", None) == CONNECTOR


def _wake_for_metrics(core: Any) -> None:
    from layertap.engines.vllm import compat
    from layertap.engines.vllm.idle import IdleSteps

    wake = compat.waker(core)
    for connector in compat.connectors(core):
        idle = getattr(connector, "idle", None)
        if wake is not None and isinstance(idle, IdleSteps):
            idle.connect(wake)


def _patch_prefix_cache() -> None:
    from layertap.engines.vllm import prefix_cache

    prefix_cache.patch()


def _patch_front_end() -> None:
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor.process_inputs

    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        from layertap.engines.vllm import frontend_check

        frontend_check.check(self, request)
        return request

    InputProcessor.process_inputs = process_inputs
