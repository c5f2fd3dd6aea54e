"""Everything that depends on vLLM's version: the tried range, and where the two model runners keep a step's batch.

The only module of the engine that reaches into private attributes of vLLM's runners. Tried with 0.26.0 (CUDA, CPU), and with
0.27.1, 0.29.0 and 0.32.0 (CPU). Of 0.33.0 the Python code was tried over 0.32's kernels (CPU).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from layertap.engines.vllm.prefix_plan import Scheduled
from layertap.errors import EngineError, UnsupportedModelError

FIRST_VERSION, BELOW_VERSION = (0, 26), (0, 34)


@dataclass(frozen=True, slots=True)
class Layout:
    """A step's batch, as the runner laid it out.

    Attributes:
        request_ids: in row order.
        query_starts: first row of each request, and the total.
        computed: tokens computed before the step; may count drafts that will turn out rejected.
        num_rows: rows of the step, without padding.
        input_ids: on the device, at least num_rows.
        positions: on the device, exact.
    """

    request_ids: list[str]
    query_starts: NDArray[np.integer]
    computed: NDArray[np.integer]
    num_rows: int
    input_ids: torch.Tensor
    positions: torch.Tensor


def version() -> str:
    """The installed vLLM's version."""
    import vllm

    return str(vllm.__version__)


def _numbers() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_version() -> None:
    """Refuse a vLLM outside of the tried range.

    Raises:
        EngineError: it says which versions are right.
    """
    if not FIRST_VERSION <= _numbers() < BELOW_VERSION:
        raise EngineError(
            f"layertap works with vLLM {'.'.join(map(str, FIRST_VERSION))} up to, not including, "
            f"{'.'.join(map(str, BELOW_VERSION))}; found {version()}. Install another vLLM, or a newer layertap"
        )


def check_config(config: Any) -> None:
    """Refuse what can't be supported.

    Raises:
        EngineError: one sentence that says what and why.
    """
    parallel = config.parallel_config
    refused = {
        "kv_sharing_fast_prefill: its later layers see only some rows": config.cache_config.kv_sharing_fast_prefill,
        "dual-batch overlap (enable_dbo, ubatch_size): a block sees only a part of the batch": getattr(
            parallel, "use_ubatching", False
        ),
        "prefill context parallelism: a rank sees only a part of the tokens": getattr(
            parallel, "prefill_context_parallel_size", 1
        )
        > 1,
        "adaptive verification of drafts: which rows are whose is decided on the GPU": getattr(
            config.speculative_config, "enable_adaptive_verification", False
        ),
        "an encoder-decoder model: vLLM runs none with a KV connector": config.model_config.is_encoder_decoder,
        "a pooling model: there is nothing to generate": config.model_config.runner_type == "pooling",
    }
    for reason, found in refused.items():
        if found:
            raise EngineError(f"hidden states can't be taken with {reason}")


def replica(config: Any) -> int:
    """Which of the data-parallel replicas this is. (The rank says 0 in all of them where the model has no experts.)"""
    return int(config.parallel_config.data_parallel_index)


def rings_on_host(config: Any) -> int:
    """How many replicas and pipeline stages of this engine have rows on the way on this machine, as far as vLLM knows."""
    parallel = config.parallel_config
    nodes = getattr(parallel, "nnodes", 1)
    return max(1, int(parallel.data_parallel_size_local)) * max(1, -(-int(parallel.pipeline_parallel_size) // nodes))


def check_shared_prefix_cache(config: Any) -> None:
    """Refuse what would leave every prefix hit without rows: vLLM 0.26's lookup for state-space models, inside MultiConnector.

    Raises:
        EngineError: it says so.
    """
    if _numbers() < (0, 27) and config.model_config.is_hybrid and config.cache_config.enable_prefix_caching:
        raise EngineError(
            f"vLLM {version()} reads the prefix cache of models with state-space layers for every request when there is a "
            "connector; inside MultiConnector that can't be prevented: turn prefix caching off, or take a newer vLLM"
        )


def look_up_as_without_connector(scheduler: Any) -> None:
    """Make the scheduler look prefixes up as it does where there is no connector.

    vLLM 0.26 and 0.27 look a model with state-space layers up another way, for connectors that load what is missing: 0.26 then
    counts as computed what no group but the longest has, and asks nobody whether the request may read at all.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if hasattr(KVConnectorBase_V1, "supports_divergent_local_hybrid_hits"):  # there it is the connector's choice
        return
    manager = scheduler.kv_cache_manager
    scheduler.has_mamba_layers = False  # 0.26; nothing else reads it after the start
    if hasattr(manager, "get_computed_blocks_for_connector"):  # 0.27
        manager.get_computed_blocks_for_connector = lambda request: (*manager.get_computed_blocks(request), False)


def waker(core: Any) -> Callable[[Callable[[], None]], None] | None:
    """How the loop of an engine core is woken: `wake(mark)` calls `mark` before; None where the core has no loop of its own."""
    queue = getattr(core, "input_queue", None)
    if queue is None:
        return None
    from vllm.v1.engine import EngineCoreRequestType

    def wake(mark: Callable[[], None]) -> None:
        # paused is what has no work left: weights may be exchanged, memory given back
        if not core.is_scheduler_paused():
            mark()
            queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    return wake


def connectors(core: Any) -> list[Any]:
    """The scheduler's connector of an engine core, and what MultiConnector has inside."""
    connector = core.scheduler.get_kv_connector()
    return [connector, *getattr(connector, "_connectors", ())]


def hash_block_size(manager: Any) -> int:
    """Tokens of one block hash of a request."""
    return int(manager.block_pool.hash_block_size)


def limited_lookup(manager: Any, lookup: Callable[[], Any], limit: int | None) -> Any:
    """What `KVCacheManager.get_computed_blocks` finds among a request's first `limit` tokens (None: among all)."""
    if limit is None:
        return lookup()
    if limit < hash_block_size(manager):
        return manager.empty_kv_cache_blocks, 0, 0
    coordinator = manager.coordinator
    find = coordinator.find_longest_cache_hit
    coordinator.find_longest_cache_hit = lambda hashes, longest: find(hashes, min(longest, limit))
    try:
        return lookup()
    finally:
        del coordinator.find_longest_cache_hit


def scheduled(scheduler_output: Any) -> Iterator[Scheduled]:
    """The requests of a step."""
    counts = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        yield Scheduled(new.req_id, new.num_computed_tokens, counts[new.req_id], True)
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield Scheduled(request_id, computed, counts[request_id], request_id in cached.resumed_req_ids)


def num_layers(config: Any) -> int:
    """Blocks of the text decoder."""
    text = config.model_config.hf_text_config
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        value = getattr(text, name, None)
        if isinstance(value, int):
            return value
    raise UnsupportedModelError(f"{config.model_config.model}: its configuration doesn't say how many blocks it has")


def hidden_size(config: Any) -> int:
    """Width of the residual stream."""
    return int(config.model_config.get_hidden_size())


def uses_v2_runner(runner: Any) -> bool:
    """Whether this is vLLM's second model runner."""
    return hasattr(runner, "prepare_inputs") and not hasattr(runner, "_prepare_inputs")


def is_dummy_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `execute_model` (V2) is a dummy run."""
    return bool(kwargs.get("dummy_run", args[2] if len(args) > 2 else False))


def layout_v1(runner: Any, num_scheduled: NDArray[np.integer]) -> Layout:
    """The batch after `_prepare_inputs` of the first runner."""
    batch = runner.input_batch
    num_requests = batch.num_reqs
    starts = np.zeros(num_requests + 1, np.int64)
    np.cumsum(num_scheduled[:num_requests], out=starts[1:])
    return Layout(
        list(batch.req_ids),
        starts,
        batch.num_computed_tokens_cpu[:num_requests],
        int(starts[-1]),
        runner.input_ids.gpu,
        runner.positions,
    )


def layout_v2(batch: Any) -> Layout:
    """The batch that `prepare_inputs` of the second runner returned."""
    return Layout(
        list(batch.req_ids),
        batch.query_start_loc_np,
        batch.num_computed_tokens_np,
        int(batch.num_tokens),
        batch.input_ids,
        batch.positions,
    )


def token_budget(config: Any) -> int:
    """The most rows of one step, with padding."""
    scheduler = config.scheduler_config
    padded = config.compilation_config.max_cudagraph_capture_size or 0
    return int(max(scheduler.max_num_batched_tokens, getattr(scheduler, "max_num_scheduled_tokens", 0) or 0, padded))


def run_dummy(runner: Any, num_tokens: int) -> Any:
    """Run a small forward without KV cache, as the memory profile does; returns the hidden states (None before the last stage)."""
    if uses_v2_runner(runner):
        return runner._dummy_run(num_tokens, skip_attn=True, is_profile=True)[0]
    return runner._dummy_run(num_tokens, is_profile=True)[0]


def dtype_name(dtype: torch.dtype) -> str:
    """float32, bfloat16 or float16."""
    return str(dtype).removeprefix("torch.")
