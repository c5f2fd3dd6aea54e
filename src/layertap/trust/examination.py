"""The whole examination, in the order of the report."""

import tempfile
from pathlib import Path
from typing import Literal

from layertap.engines.vllm.installed import require_vllm
from layertap.errors import LayertapError, OptionError
from layertap.llm import LLM
from layertap.trust.findings import Report
from layertap.trust.model import examine_model, examine_versions
from layertap.trust.store import examine_store
from layertap.trust.versions import examine_faults, examine_ranges
from layertap.trust.vllm import examine_vllm, start_vllm


def examine(
    model: str,
    *,
    storage: Path,
    engine: Literal["transformers", "vllm"] = "transformers",
    dtype: str = "auto",
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Report:
    """Examine a model on an engine, and the folder that files go to.

    Args:
        model: folder, hub id or GGUF file.
        storage: the folder.
        engine: which.
        dtype: compute dtype, as for `extract`.
        device: as for `extract`.
        revision: of the hub.
        trust_remote_code: code of the checkpoint may run.

    Raises:
        OptionError: an option that the engine can't honour, or an engine that isn't installed.
    """
    if engine == "vllm" and device is not None:
        raise OptionError(f"device: vLLM runs on the device that it was built for, {device!r} can't be asked for")
    if engine == "vllm":
        require_vllm()
    report = Report(model=model, engine=engine)
    examine_versions(report)
    examine_ranges(report)
    examine_store(report, storage)
    if engine == "vllm":
        _on_vllm(report, model, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
        return report
    try:
        with (
            tempfile.TemporaryDirectory(prefix="layertap-doctor-") as folder,
            LLM(
                model,
                layers="all",
                kv_transfer_config={
                    "kv_connector": "HiddenStatesConnector",
                    "kv_connector_extra_config": {"shared_storage_path": folder, "min_free_bytes": 0},
                },
                dtype=dtype,
                device=device,
                revision=revision,
                trust_remote_code=trust_remote_code,
            ) as llm,
        ):
            examine_faults(report, llm._front.engine.model_type)
            examine_model(report, llm, Path(folder), trust_remote_code=trust_remote_code)
    except LayertapError as exc:
        report.add("model", "load", "bad", str(exc))
    return report


def _on_vllm(report: Report, model: str, *, dtype: str, revision: str | None, trust_remote_code: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="layertap-doctor-") as folder:
        try:
            llm = start_vllm(model, Path(folder), dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
        except Exception as exc:  # noqa: BLE001 - vLLM raises what it likes
            report.add("model", "load", "bad", f"vLLM can't run it here: {exc}")
            return
        with llm:
            examine_faults(report, str(llm._front._llm.llm_engine.vllm_config.model_config.hf_config.model_type))
            examine_vllm(report, llm, trust_remote_code=trust_remote_code)
