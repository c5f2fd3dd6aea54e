"""Starting vLLM inside the test's process, and comparing what it saved with the oracle."""

import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
TOLERANCE = 1e-4


@contextmanager
def running(model: Path, storage: Path, extra: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """An engine in this process; the caller has set ENVIRONMENT before vLLM was imported."""
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory

    settings: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "seed": 0,
    }
    connector = KVTransferConfig(
        kv_connector="HiddenStatesConnector",
        kv_role="kv_producer",
        kv_connector_extra_config={"layers": "all", "shared_storage_path": str(storage), **(extra or {})},
    )
    with _closed_modules_hidden():
        llm = LLM(**{**settings, **_attention_of_float32(model), **options}, kv_transfer_config=connector)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def _attention_of_float32(model: Path) -> dict[str, Any]:
    """On CPUs with AMX vLLM takes a kernel for latent attention that knows bfloat16 only, unless it is told another."""
    is_latent = "kv_lora_rank" in json.loads((model / "config.json").read_text())
    return {"attention_backend": "CPU_MLA"} if is_latent and torch.cpu._is_amx_tile_supported() else {}


@contextmanager
def _closed_modules_hidden() -> Iterator[None]:
    """At each start vLLM looks into every module of its process; into some (llvmlite's, what flask gives out) it can't."""
    hidden = {name: module for name, module in list(sys.modules.items()) if not _can_be_looked_into(module)}
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)


def _can_be_looked_into(module: object) -> bool:
    try:
        for value in list((getattr(module, "__dict__", None) or {}).values()):
            if hasattr(value, "__dict__"):
                vars(value).get("kernel")
    except Exception:  # noqa: BLE001 - whatever it is, vLLM would end with it
        return False
    return True


def prompts(lengths: Sequence[int], seed: int = 0, shared_prefix: int = 0) -> list[dict[str, list[int]]]:
    """Random prompts of these lengths; the first `shared_prefix` tokens are the same in all."""
    rng = random.Random(seed)
    prefix = [rng.randrange(8, 264) for _ in range(shared_prefix)]
    return [
        {"prompt_token_ids": (prefix + [rng.randrange(8, 264) for _ in range(length)])[:length]} for length in lengths
    ]


def params(max_tokens: int = 8, *, temperature: float = 0.0, **options: Any) -> Any:
    """Sampling parameters; `options` whose names vLLM doesn't know as sampling parameters are capture options."""
    from vllm import SamplingParams

    sampling = {name: options.pop(name) for name in ("n", "stop", "seed", "logprobs") if name in options}
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=True,
        extra_args={"kv_transfer_params": options},
        **sampling,
    )


def check_file(
    model: Any,
    path: str,
    token_ids: Sequence[int],
    *,
    layers: Sequence[int] | None = None,
    rows: slice = slice(None),
    attention: str = "eager",
) -> None:
    """The file at `path` holds the oracle's rows `rows` of the sequence `token_ids` (all but its last token)."""
    from layertap import load_hidden_states
    from layertap.testing import oracle

    loaded = load_hidden_states(path, timeout=30)
    fed = list(token_ids)
    assert loaded["token_ids"].tolist() == fed[rows]
    wanted = oracle.hidden_states(model, fed, layers, attention)[rows]
    assert loaded["hidden_states"].shape == wanted.shape
    error = (loaded["hidden_states"].float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() < TOLERANCE, f"relative error {float(error.max())}"


def load_oracle(name: str, path: Path) -> Any:
    """The transformers model of a checkpoint, float32; it computes what vLLM does, where that is something else."""
    import checkpoints

    from layertap.testing import zoo

    model = zoo.model_class(name).from_pretrained(path, dtype=torch.float32).eval()
    checkpoints.ONLY_ORACLE.get(name, lambda _: None)(model)
    return model


def set_environment() -> None:
    """Settings that vLLM reads when it is imported: in-process, quiet, small."""
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
