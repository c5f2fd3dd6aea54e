"""`prefix_rows_bytes`: how the plan for cached blocks' rows hooks into vLLM's scheduler.

vLLM asks its KV cache manager how many leading blocks of a request are cached; for a capturing request the question is limited to
the tokens that it may read (`prefix_plan`), by vLLM's own upper bound of a hit. So what isn't there counts as not computed, for
whatever kinds of KV cache the model has. When vLLM resets its prefix cache the rows go too.
"""

import functools
import logging
import weakref
from typing import Any

from layertap.engines.vllm import compat
from layertap.engines.vllm.configured import Configured
from layertap.engines.vllm.prefix_plan import PrefixPlan
from layertap.engines.vllm.prefix_rows import slot_bytes
from layertap.errors import EngineError, OptionError
from layertap.memory import memory_bytes

logger = logging.getLogger(__name__)

_NAME = "kv_connector_extra_config.prefix_rows_bytes"
_PLAN = "_layertap_prefix_plan"
_plans: "weakref.WeakSet[PrefixPlan]" = weakref.WeakSet()


def make_plan(config: Any, found: Configured) -> PrefixPlan | None:
    """The plan of an engine, or None where the option isn't given."""
    if found.options.prefix_rows_bytes is None:
        return None
    check(config, found)
    plan = PrefixPlan(found.options.prefix_rows_bytes, _cell_bytes(config, found))
    _plans.add(plan)
    return plan


def check(config: Any, found: Configured) -> None:
    """Refuse the option where it can't be honoured, and a prefix cache whose hits would have no rows.

    Raises:
        OptionError: a limit that is too small or larger than the machine's memory.
        EngineError: vLLM's configuration leaves no room for it.
    """
    if found.shared:
        compat.check_shared_prefix_cache(config)
    limit = found.options.prefix_rows_bytes
    if limit is None:
        return
    memory = memory_bytes()
    if limit > memory:
        raise OptionError(f"{_NAME}: {limit} bytes are more than this machine's memory of {memory}")
    least = slot_bytes(int(config.cache_config.block_size or 1), _cell_bytes(config, found))
    if limit < least:
        raise OptionError(f"{_NAME}: {limit} bytes don't hold one block's rows of one layer, which take {least}")
    if not config.cache_config.enable_prefix_caching:
        raise EngineError(f"{_NAME}: vLLM's prefix caching is off for this model; leave the option out, or turn it on")
    if found.shared:
        raise EngineError(
            f"{_NAME}: not inside MultiConnector: another connector may load KV for tokens whose rows aren't there"
        )


def attach(plan: PrefixPlan, request: Any) -> None:
    """Let the plan decide what this request reads."""
    setattr(request, _PLAN, plan)


def patch() -> None:
    """Wrap the KV cache manager's methods; requests without a plan aren't touched."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    lookup, reset = KVCacheManager.get_computed_blocks, KVCacheManager.reset_prefix_cache

    @functools.wraps(lookup)
    def get_computed_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        plan: PrefixPlan | None = getattr(request, _PLAN, None)
        find = functools.partial(lookup, self, request, *args, **kwargs)
        return find() if plan is None else compat.limited_lookup(self, find, _readable(plan, self, request))

    @functools.wraps(reset)
    def reset_prefix_cache(self: Any) -> bool:
        for plan in list(_plans):
            plan.reset()
        return bool(reset(self))

    KVCacheManager.get_computed_blocks = get_computed_blocks
    KVCacheManager.reset_prefix_cache = reset_prefix_cache


def _readable(plan: PrefixPlan, manager: Any, request: Any) -> int | None:
    try:
        plan.set_block_size(compat.hash_block_size(manager))
        return plan.readable(request.request_id)
    except Exception:  # raising would end the engine; everything is computed then
        logger.exception("layertap: request %s reads nothing from the prefix cache", request.request_id)
        return 0


def _cell_bytes(config: Any, found: Configured) -> int:
    return found.hidden_size * int(config.model_config.dtype.itemsize)
