"""The whole examination, in the order of the report."""

import tempfile
from pathlib import Path

from layertap.errors import LayertapError
from layertap.llm import LLM
from layertap.trust.findings import Report
from layertap.trust.model import examine_model, examine_versions
from layertap.trust.store import examine_store


def examine(
    model: str,
    *,
    storage: Path,
    dtype: str = "auto",
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Report:
    """Examine a model on the embedded engine, and the folder that files go to.

    Args:
        model: folder, hub id or GGUF file.
        storage: the folder.
        dtype: compute dtype, as for `extract`.
        device: as for `extract`.
        revision: of the hub.
        trust_remote_code: code of the checkpoint may run.
    """
    report = Report(model=model, engine="transformers")
    examine_versions(report)
    examine_store(report, storage)
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
            examine_model(report, llm, Path(folder), trust_remote_code=trust_remote_code)
    except LayertapError as exc:
        report.add("model", "load", "bad", str(exc))
    return report
