"""vLLM's own scheduler over a model with attention and state-space caches: a capturing request doesn't read the prefix cache.

Without a model: vLLM's CPU build didn't run state-space layers in the versions that look such prefixes up another way beside a
connector. The engine does what `make_scheduler` does, and calls `look_up_as_without_connector` too.
"""

from typing import get_args

import checkpoints
import pytest
import torch

BLOCK = 16
PROMPT = list(range(10, 10 + 9 * BLOCK + 3))


@pytest.fixture(scope="module")
def config(checkpoint_folder):
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(get_hash_fn_by_name("sha256"))
    made = EngineArgs(
        model=str(checkpoints.save("granitemoehybrid", checkpoint_folder)),
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        enable_prefix_caching=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="HiddenStatesConnector",
            kv_role="kv_producer",
            kv_connector_extra_config={"layers": [1], "capture_by_default": False},
        ),
    ).create_engine_config()
    assert made.model_config.is_hybrid
    made.cache_config.mamba_cache_mode = cache_mode()
    made.cache_config.block_size, made.cache_config.num_gpu_blocks = BLOCK, 200
    return made


def cache_mode():
    """Of the states of each block, where vLLM has that still (in older versions); else of those at which a chunk ended."""
    from vllm.config.cache import MambaCacheMode

    return "all" if "all" in get_args(MambaCacheMode) else "align"


def make_scheduler(config):
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from layertap.engines.vllm import compat

    groups = [
        KVCacheGroupSpec(["a"], FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)),
        KVCacheGroupSpec(
            ["m"],
            MambaSpec(block_size=BLOCK, shapes=((1024,),), dtypes=(torch.float32,), mamba_cache_mode=cache_mode()),
        ),
    ]
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )
    compat.look_up_as_without_connector(scheduler)
    return scheduler


def run(scheduler, name, tokens, **options):
    """Run a request of one token; how much of its prompt was read from the cache."""
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    hash_fn = get_hash_fn_by_name("sha256")
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": options})
    scheduler.add_request(Request(name, tokens, sampling, None, block_hasher=get_request_block_hasher(BLOCK, hash_fn)))
    found, left = None, len(tokens)
    while left:  # a chunk may end where a state is to be cached
        output = scheduler.schedule()
        if found is None:
            (new,) = output.scheduled_new_reqs
            found, left = new.num_computed_tokens, left - new.num_computed_tokens
        left -= output.num_scheduled_tokens[name]
        sampled = [[]] if left else [[7]]
        scheduler.update_from_output(output, ModelRunnerOutput([name], {name: 0}, sampled_token_ids=sampled))
    return found


def test_a_capturing_request_computes_its_prompt_and_others_read_the_cache(config):
    scheduler = make_scheduler(config)
    assert run(scheduler, "first", PROMPT) == 0
    assert run(scheduler, "plain", PROMPT) == 9 * BLOCK
    assert run(scheduler, "captured", PROMPT, capture=True) == 0
    assert run(scheduler, "last", PROMPT, capture=True, positions="last") == 9 * BLOCK
    assert run(scheduler, "again", PROMPT) == 9 * BLOCK


def test_kept_rows_limit_what_is_read(config, monkeypatch):
    import dataclasses

    transfer = dataclasses.replace(
        config.kv_transfer_config,
        kv_connector_extra_config={"layers": [1], "capture_by_default": False, "prefix_rows_bytes": 1 << 20},
    )
    monkeypatch.setattr(config, "kv_transfer_config", transfer)
    scheduler = make_scheduler(config)
    half = PROMPT[: 4 * BLOCK + 2]
    assert run(scheduler, "plain", PROMPT) == 0
    assert run(scheduler, "kept", half, capture=True) == 0  # four blocks
    assert run(scheduler, "captured", PROMPT, capture=True) == 4 * BLOCK
    assert run(scheduler, "whole", PROMPT, capture=True) == 9 * BLOCK
