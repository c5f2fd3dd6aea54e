"""Are the rows that vLLM's engine saves right: short and long prompts, in chunks, behind a shared prefix, generated tokens.

The reference is plain transformers in float32, as for the embedded engine. What vLLM itself said (its tokens and their
logprobs) is compared with the saved rows of the last layer, sent through the model's own norm and head.
"""

from pathlib import Path
from typing import Any

import numpy as np

from layertap.datasets.recompute import TOLERANCES, Reference
from layertap.errors import LayertapError
from layertap.files.read import read_file
from layertap.files.values import Floats, to_float32
from layertap.llm import LLM
from layertap.outputs import RequestOutput
from layertap.params import SamplingParams
from layertap.trust.findings import Report
from layertap.trust.rows import MAX_TOKENS, against_plain, compare, relative_errors, some_prompts

_LONGEST = 1024
_MAX_SEQUENCES = 8
_TAIL = 8
_LOGPROB_TOLERANCE = {"float32": 1e-3}
_COARSE_LOGPROBS = 0.3


def start_vllm(
    model: str, storage: Path, *, dtype: str, revision: str | None, trust_remote_code: bool, **engine_options: Any
) -> LLM:
    """Start vLLM as its users would, but with sizes that make a prompt of some hundred tokens go in chunks.

    Args:
        model: folder or hub id.
        storage: where files of generation go.
        dtype: compute dtype.
        revision: of the hub.
        trust_remote_code: code of the checkpoint may run.
        engine_options: more for vLLM.
    """
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    own = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = min(_LONGEST, own) if isinstance(own, int) else _LONGEST
    return LLM(
        model,
        engine="vllm",
        layers="all",
        kv_transfer_config={
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_extra_config": {"shared_storage_path": str(storage), "min_free_bytes": 0},
        },
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        max_model_len=longest,
        max_num_batched_tokens=max(longest // 4, _MAX_SEQUENCES),
        max_num_seqs=_MAX_SEQUENCES,
        **engine_options,
    )


def examine_vllm(report: Report, llm: LLM, *, trust_remote_code: bool) -> None:
    """Run a few prompts and compare.

    Args:
        report: takes the findings.
        llm: on vLLM's engine, with all layers and a storage.
        trust_remote_code: code of the checkpoint may run, in the reference.
    """
    chunk = int(llm._front._llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens)
    prompts = _prompts(llm, chunk)
    info = llm.info
    quantized = f", {info.quantization}" if info.quantization else ""
    text = f"in {info.dtype} on {info.device}{quantized}, {info.num_layers} blocks, hidden size {info.hidden_size}"
    report.add("model", "computed", "good", f"{text}, by vLLM {info.engine_version}")
    longest = max(len(ids) for ids in prompts)
    chunked = longest > chunk
    report.add(
        "model",
        "prompts",
        "good" if chunked else "note",
        f"{len(prompts)} of {min(len(ids) for ids in prompts)} to {longest} tokens, two with a common beginning, at most {chunk} "
        f"tokens a step{'' if chunked else ': none goes in chunks'}",
    )
    try:
        single = [_rows(llm, [ids])[0] for ids in prompts]
        rows = _rows(llm, prompts)
        outputs = _generate(llm, prompts)
        paths = [_path(output) for output in outputs]
        files = [read_file(path) for path in paths]
    except LayertapError as exc:
        report.add("rows", "extraction", "bad", str(exc))
        return
    tolerance = TOLERANCES.get(info.dtype, 3e-2)
    compare(
        report,
        "together and alone",
        relative_errors(rows, single),
        tolerance,
        "prompts in one batch, in chunks, behind a prefix that was run before, and each by itself",
    )
    reference = against_plain(report, llm, prompts, rows, tolerance, trust_remote_code=trust_remote_code)
    if reference is None:
        return
    generated = [to_float32(file.rows, file.info.dtype) for file in files]
    count = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    for output, file in zip(outputs, files, strict=True):
        said = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        if file.token_ids.tolist() != said:
            report.add("rows", "generated and prefilled", "bad", "a file's tokens aren't those of vLLM's answer")
            return
    exact = [reference.rows(file.token_ids, range(info.num_layers + 1)) for file in files]
    compare(
        report,
        "generated and prefilled",
        relative_errors(generated, exact),
        tolerance,
        f"rows of prompts and of {count} generated tokens",
    )
    _vllms_own_words(report, reference, outputs, generated, _LOGPROB_TOLERANCE.get(info.dtype, _COARSE_LOGPROBS))


def _prompts(llm: LLM, chunk: int) -> list[list[int]]:
    """Short ones, a long one, and one that begins like it."""
    short = some_prompts(llm)
    length = min(chunk * 5 // 2, llm.info.max_model_len - MAX_TOKENS - 1)
    text = [token for ids in short for token in ids]
    long = (text * (length // len(text) + 1))[:length]
    return [*short, long, [*long[:-_TAIL], *reversed(long[-_TAIL:])]]


def _rows(llm: LLM, prompts: list[list[int]]) -> list[Floats]:
    found = sorted(llm.extract([{"prompt_token_ids": ids} for ids in prompts], layers="all"), key=lambda s: s.index)
    return [sample.hidden_states.float().numpy() for sample in found]


def _generate(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        logprobs=1,
        extra_args={"kv_transfer_params": {"include_output_tokens": True, "layers": "all"}},
    )
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def _path(output: RequestOutput) -> str:
    handle = output.outputs[0].kv_transfer_params or {}
    if "hidden_states_path" not in handle:
        raise LayertapError(f"vLLM answered without a file: {handle}")
    path: str = handle["hidden_states_path"]
    return path


def _vllms_own_words(
    report: Report, reference: Reference, outputs: list[RequestOutput], rows: list[Floats], tolerance: float
) -> None:
    """The saved last layer through the model's norm and head, beside the tokens that vLLM chose and their logprobs."""
    name = "last layer to vLLM's tokens"
    differences: list[float] = []
    same = 0
    for output, given in zip(outputs, rows, strict=True):
        chosen = output.outputs[0]
        ids = [*output.prompt_token_ids, *chosen.token_ids][:-1]
        try:
            logits = reference.logits(ids, given[:, -1].copy())[len(output.prompt_token_ids) - 1 :].astype(np.float64)
        except (RuntimeError, AttributeError) as exc:
            report.add("rows", name, "note", f"this model's head can't be asked: {exc}")
            return
        top = logits.max(axis=-1, keepdims=True)
        logprobs = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
        same += int((logits.argmax(axis=-1) == np.asarray(chosen.token_ids)).sum())
        for i, (token, said) in enumerate(zip(chosen.token_ids, chosen.logprobs or (), strict=True)):
            assert said is not None
            differences.append(abs(float(logprobs[i, token]) - said[token].logprob))
    middle = float(np.median(differences))
    good = middle <= tolerance
    text = (
        f"{len(differences)} generated tokens: same best token at {same / len(differences):.0%}, logprobs differ by "
        f"{middle:.1e} in the median, {max(differences):.1e} at most (tolerance of the median {tolerance:g})"
    )
    report.add("rows", name, "good" if good else "bad", text)
