"""MODEL to configuration and tokenizer: a folder, a hub id or a GGUF file; what dtype and device it gets. No weights yet."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from layertap.errors import ModelError, OptionError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["ModelSource", "fast_cpu_dtypes", "open_model", "open_tokenizer"]

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}

_CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length", "seq_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from, resolved: what every later read of it uses.

    Attributes:
        name: MODEL as the caller wrote it.
        path: folder or hub id.
        gguf_file: the GGUF file in it, if it is one.
        revision: the commit, once it is known, so that a later read gets the same weights.
        trust_remote_code: whether code of the checkpoint may run.
        config: the configuration.
        model_class: the class that is built.
        dtype: dtype of the weights and of the rows.
        device: where the model runs.
    """

    name: str
    path: str
    gguf_file: str | None
    revision: str | None
    trust_remote_code: bool
    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    dtype: torch.dtype
    device: torch.device

    @property
    def text_config(self) -> PreTrainedConfig:
        """The configuration of the text decoder."""
        return self.config.get_text_config(decoder=True)

    @property
    def quantization(self) -> str | None:
        """How the checkpoint is quantized, or None."""
        if self.gguf_file:
            return "gguf (dequantized)"
        method = getattr(self.config, "quantization_config", None) or {}
        found = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", None)
        return None if found is None else str(getattr(found, "value", found))

    @property
    def max_model_len(self) -> int:
        """The longest sequence that the model has positions for; rotary tables that are stretched reach further."""
        rope = getattr(self.text_config, "rope_parameters", None) or {}
        factor = rope.get("factor", 1.0) if rope.get("rope_type") in ("dynamic", "linear") else 1.0
        stretched = rope.get("original_max_position_embeddings", 0) * rope.get("factor", 1.0)
        for name in _LENGTH_FIELDS:
            value = getattr(self.text_config, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return max(int(value * factor), int(stretched) if rope.get("rope_type") == "yarn" else 0)
        return 2**31 - 1


def open_model(
    model: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ModelSource:
    """Find the model and read its configuration; no weights yet.

    Raises:
        ModelError: a file is missing or can't be read; the message names it.
        UnsupportedModelError: not a causal language model.
        OptionError: an unknown dtype or a device that isn't there.
    """
    from transformers import AutoConfig

    model = os.path.expanduser(model)
    path, gguf_file = _locate(model)
    where = str(Path(path) / gguf_file) if gguf_file else path
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if gguf_file:
        options["gguf_file"] = gguf_file
    try:
        config = AutoConfig.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError) as exc:
        hub = "" if Path(path).exists() else " (there is no such folder here, so it was taken for a hub id)"
        raise ModelError(f"can't read the configuration of {where}{hub}: {exc}") from exc
    chosen_device = _device(device)
    model_class = _model_class(config, path, revision, trust_remote_code)
    revision = getattr(config, "_commit_hash", None) or revision
    if model_class.config_class is type(config.get_text_config(decoder=True)):
        config = config.get_text_config(decoder=True)  # a text decoder taken out of a multimodal checkpoint
    return ModelSource(
        name=model,
        path=path,
        gguf_file=gguf_file,
        revision=revision,
        trust_remote_code=trust_remote_code,
        config=config,
        model_class=model_class,
        dtype=_choose_dtype(dtype, config, chosen_device, where),
        device=chosen_device,
    )


def open_tokenizer(source: ModelSource, path: str | Path | None = None) -> Any:
    """Read the model's tokenizer, or the one at `path`.

    Raises:
        ModelError: there is none, or it can't be read.
    """
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
    if path is None:
        options["revision"] = source.revision
        if source.gguf_file:
            options["gguf_file"] = source.gguf_file
    try:
        return AutoTokenizer.from_pretrained(source.path if path is None else path, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError) as exc:
        raise ModelError(f"can't read the tokenizer of {path or source.name}: {exc}") from exc


def _locate(model: str) -> tuple[str, str | None]:
    """Split MODEL into a folder or hub id, and a GGUF file in it."""
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").exists():
            ggufs = sorted(path.glob("*.gguf"))
            if len(ggufs) == 1:
                return str(path), ggufs[0].name
            found = (
                f"several GGUF files ({', '.join(g.name for g in ggufs)}); name one" if ggufs else "no GGUF file either"
            )
            raise ModelError(f"{path / 'config.json'} is missing, and the folder has {found}")
        return str(path), None
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is neither a model folder nor a .gguf file")
        return str(path.parent), path.name
    if model.endswith(".gguf"):
        owner, _, rest = model.partition("/")
        name, _, file = rest.partition("/")
        if file and owner not in ("", ".", "..", "~"):
            return f"{owner}/{name}", file
        raise ModelError(f"{model}: no such file")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelError(f"{model}: no such folder or file")
    return model, None


def _model_class(
    config: PreTrainedConfig, path: str, revision: str | None, trust_remote_code: bool
) -> type[PreTrainedModel]:
    """The class that the checkpoint names, if it is a language model, else the first mapped to the configuration."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    remote = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if remote and trust_remote_code:
        cls: type[PreTrainedModel] = get_class_from_dynamic_module(remote, path, revision=revision)
        return cls
    architectures = config.architectures or []
    mapped: list[type[PreTrainedModel]] = []
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            mapped += list(found) if isinstance(found, tuple | list) else [found]
    named = (getattr(transformers, name, None) for name in architectures if name.endswith(_CAUSAL_ENDINGS))
    classes = [cls for cls in mapped if cls.__name__ in architectures]
    classes += [cls for cls in named if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)]
    classes += mapped
    what = f"model type {config.model_type!r} ({', '.join(architectures) or 'no architecture named'})"
    if config.is_encoder_decoder and not any("ForCausalLM" in name for name in architectures):
        raise UnsupportedModelError(
            f"{path}: {what} is an encoder-decoder model; its decoder reads an encoder's output beside the prompt, which "
            "extraction doesn't have"
        )
    if classes:
        return classes[0]
    raise UnsupportedModelError(f"{path}: {what} isn't a causal language model of the installed transformers")


def _device(device: str | torch.device | None) -> torch.device:
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as exc:
        raise OptionError(f"device: {device!r} isn't a device: {exc}") from exc
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"device: {device!r} was asked for, but torch sees no CUDA device here; leave it out, or say 'cpu'"
        )
    return chosen


def _choose_dtype(dtype: str | torch.dtype, config: PreTrainedConfig, device: torch.device, where: str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        if dtype not in _DTYPES:
            raise OptionError(f"dtype: {dtype!r} is unknown; expected 'auto' or one of {', '.join(_DTYPES)}")
        return _DTYPES[dtype]
    stored = config.get_text_config(decoder=True).dtype or config.dtype
    checkpoint = (
        stored if isinstance(stored, torch.dtype) else _DTYPES.get(str(stored).removeprefix("torch."), torch.float32)
    )
    if stored is None:
        logger.info("%s names no dtype: float32", where)
    if device.type == "cpu" and checkpoint in (torch.bfloat16, torch.float16):
        if checkpoint not in fast_cpu_dtypes():
            logger.warning("%s: float32 instead of %s, for which this CPU has no units", where, checkpoint)
            return torch.float32
        logger.info("%s: %s, this CPU has units for it", where, checkpoint)
    return checkpoint


def fast_cpu_dtypes() -> frozenset[torch.dtype]:
    """The 16-bit dtypes for which this CPU has matrix or dot-product units (without them they are over 10x slower)."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    flags = {name for name, present in capabilities.items() if present}
    cpuinfo = Path("/proc/cpuinfo")
    if not flags and cpuinfo.exists():
        flags = set(cpuinfo.read_text().split())
    fast = set()
    if flags & {"avx512_bf16", "amx_bf16", "amx_tile", "bf16", "arm_bf16", "sve_bf16"}:
        fast.add(torch.bfloat16)
    if flags & {"avx512_fp16", "amx_fp16"}:
        fast.add(torch.float16)
    return frozenset(fast)
