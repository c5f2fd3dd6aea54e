"""MODEL to weights: a folder, a hub id or a GGUF file, read only as deep as somebody asked.

`open_model` reads the configuration and the tokenizer. `Weights.at_least(depth)` reads tensors: blocks deeper than `depth`,
an untied head and towers for pictures or sound are *placeholders* without parameters in a subclass of the model's own
class, so that transformers' loader finds no place for their tensors and never reads them, while every number in the
configuration stays what it is. A deeper call reads the missing blocks and takes over those that are there.
A checkpoint that lacks a needed tensor is an error: a randomly initialised weight is never used.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from layertap.capture.blocks import Blocks, find_blocks
from layertap.capture.residual import Residual, find_residual
from layertap.errors import ModelError, OptionError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["Layout", "ModelSource", "Placeholder", "Weights", "open_model", "open_tokenizer"]

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


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
        """The longest sequence that the model has positions for."""
        for name in (
            "max_position_embeddings",
            "n_positions",
            "max_seq_len",
            "n_ctx",
            "max_sequence_length",
            "seq_length",
        ):
            value = getattr(self.text_config, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
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

    path, gguf_file = _locate(str(model))
    where = str(Path(path) / gguf_file) if gguf_file else path
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if gguf_file:
        options["gguf_file"] = gguf_file
    try:
        config = AutoConfig.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError) as exc:
        raise ModelError(f"can't read the configuration of {where}: {exc}") from exc
    chosen_device = _device(device)
    return ModelSource(
        name=str(model),
        path=path,
        gguf_file=gguf_file,
        revision=getattr(config, "_commit_hash", None) or revision,
        trust_remote_code=trust_remote_code,
        config=config,
        model_class=_model_class(config, path, revision, trust_remote_code),
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
    path = Path(model).expanduser()
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
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    remote = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if remote and trust_remote_code:
        cls: type[PreTrainedModel] = get_class_from_dynamic_module(remote, path, revision=revision)
        return cls
    architectures = config.architectures or []
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        try:
            found = auto._model_mapping[type(config)]
        except KeyError:
            continue
        classes: list[type[PreTrainedModel]] = list(found) if isinstance(found, tuple | list) else [found]
        named = {cls.__name__: cls for cls in classes}
        return next((named[name] for name in architectures if name in named), classes[0])
    raise UnsupportedModelError(
        f"{path}: model type {config.model_type!r} ({', '.join(architectures) or 'no architecture named'}) isn't a causal "
        "language model of the installed transformers"
    )


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


class Placeholder(nn.Module):
    """Stands for a module whose weights nobody needs; it keeps the plain attributes that its parent may look at."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.stands_for = type(original).__name__
        plain = {
            k: v
            for k, v in vars(original).items()
            if not k.startswith("_") and not isinstance(v, nn.Module | torch.Tensor)
        }
        self.__dict__.update(plain)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Refuse: the early exit must have come first."""
        raise AssertionError(f"a {self.stands_for} that isn't loaded was run")


class Layout:
    """Where the blocks of a model are, for any copy of it that is loaded to whatever depth.

    Args:
        model: a complete copy; the meta device will do.
    """

    def __init__(self, model: nn.Module) -> None:
        self.found: Blocks = find_blocks(model)
        container = model.get_submodule(self.found.container_path)
        names = [name for name, _ in container.named_children()][: self.found.num_layers]
        self.path = self.found.container_path
        self.names = tuple(f"{self.path}.{name}" for name in names)
        embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
        self.vocab_size = int(embeddings.weight.shape[0])
        self.hidden_size = self.found.hidden_size or int(embeddings.weight.shape[1])

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of a copy, placeholders among them."""
        return [model.get_submodule(name) for name in self.names]

    def residual_of(self, model: nn.Module) -> Residual:
        """How a copy carries its stream; models with several streams make one of them with modules of their own."""
        config: Any = model.config
        decoder = model.get_submodule(self.found.decoder_path)
        return find_residual(decoder, self.found.blocks, config.get_text_config(decoder=True), self.found.hidden_size)


class Weights:
    """The weights of one model, grown on demand and never shrunk. Thread-safe."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._model: PreTrainedModel | None = None
        self._depth = 0
        self._complete = False
        self.layout = Layout(_build_on_meta(source))
        self.num_layers = len(self.layout.names)

    @property
    def depth(self) -> int:
        """How many blocks are loaded."""
        return self._depth

    def at_least(self, depth: int, *, complete: bool = False) -> PreTrainedModel:
        """Return the model with its first `depth` blocks loaded.

        Args:
            depth: blocks needed.
            complete: everything, the head too, as generation needs it.

        Raises:
            ModelError: a weight file is missing, corrupt, or lacks a tensor.
        """
        with self._lock:
            if complete and not self._complete:
                self._model, self._depth = self._load(range(self.num_layers), complete=True), self.num_layers
                self._complete = True
            elif self._model is None or depth > self._depth:
                self._model = self._deepen(depth)
                self._depth = depth
            return self._model

    def _deepen(self, depth: int) -> PreTrainedModel:
        old = self._model
        if old is None or _ties_cross_blocks(old, self.layout.path):
            return self._load(range(depth), complete=False)
        fresh = self._load(range(self._depth, depth), complete=False)
        for index in range(self._depth):
            name = self.layout.names[index]
            parent, _, leaf = name.rpartition(".")
            setattr(fresh.get_submodule(parent), leaf, old.get_submodule(name))
        return fresh

    def _load(self, real: range, *, complete: bool) -> PreTrainedModel:
        source = self.source
        cls = source.model_class if complete else _partial_class(source.model_class, self.layout, real)
        if complete or len(real) == self.num_layers:
            logger.info("%s: loading all %d blocks in %s", source.name, self.num_layers, source.dtype)
        else:
            logger.info(
                "%s: loading blocks %d to %d of %d in %s",
                source.name,
                real.start,
                real.stop - 1,
                self.num_layers,
                source.dtype,
            )
        options: dict[str, Any] = {"dtype": source.dtype, "config": source.config, "output_loading_info": True}
        if source.device.type != "cpu":
            options["device_map"] = {"": source.device}
        if source.gguf_file:
            from transformers import GgufConfig

            options |= {"gguf_file": source.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
        keep_all = complete or len(real) == self.num_layers
        with _checkpoint(source, None if keep_all else (self.layout.path, real)) as path:
            try:
                model, report = cls.from_pretrained(path, revision=source.revision, **options)
            except Exception as exc:
                raise ModelError(f"can't load the weights of {source.name}: {type(exc).__name__}: {exc}") from exc
        _refuse_random_weights(source, report)
        model.config.name_or_path = source.path
        model.requires_grad_(False)
        return model.eval()


def _build_on_meta(source: ModelSource) -> PreTrainedModel:
    with torch.device("meta"):
        return source.model_class(copy.deepcopy(source.config))


def _ties_cross_blocks(model: PreTrainedModel, path: str) -> bool:
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return any(name.startswith(path + ".") for pair in tied.items() for name in pair)


def _partial_class(cls: type[PreTrainedModel], layout: Layout, real: range) -> type[PreTrainedModel]:
    """A subclass whose instances hold only the blocks in `real`, and no head or tower of their own."""

    def init(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        tied = dict(getattr(self, "all_tied_weights_keys", None) or {})
        for name in _not_needed(self, layout, real, tied):
            parent, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(parent), leaf, Placeholder(self.get_submodule(name)))
        kept = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        if tied:
            self.all_tied_weights_keys = {target: origin for target, origin in tied.items() if target in kept}

    # The same name and module: transformers looks both up for weight conversions and remote code.
    body = {"__init__": init, "__module__": cls.__module__, "_keys_to_ignore_on_load_unexpected": [r".*"]}
    return type(cls.__name__, (cls,), body)


def _not_needed(model: PreTrainedModel, layout: Layout, real: range, tied: dict[str, str]) -> list[str]:
    names = [name for index, name in enumerate(layout.names) if index not in real]
    head = model.get_output_embeddings()
    modules = {id(module): name for name, module in model.named_modules()}
    if head is not None and id(head) in modules:
        name = modules[id(head)]
        if not any(key.startswith(name + ".") for pair in tied.items() for key in pair):
            names.append(name)
    names += _towers(model, layout.path)
    return names


def _towers(model: PreTrainedModel, path: str) -> list[str]:
    """Whole models inside the model that don't hold the text decoder: vision, sound."""
    from transformers import PreTrainedModel

    towers: list[str] = []
    for name, module in model.named_modules():
        if not name or not isinstance(module, PreTrainedModel) or f"{path}.".startswith(f"{name}."):
            continue
        if not any(name.startswith(f"{tower}.") for tower in towers) and not path.startswith(name):
            towers.append(name)
    return towers


@contextmanager
def _checkpoint(source: ModelSource, needed: tuple[str, range] | None) -> Iterator[str]:
    """Give the path to load from: for a part of a sharded checkpoint a folder with links to the shards that are needed."""
    folder = Path(source.path)
    if source.gguf_file:
        yield source.path
        return
    index_file = _index_file(source)
    if index_file is None:
        if folder.is_dir():
            _check_headers(sorted(folder.glob("model.safetensors")))
        yield source.path
        return
    try:
        index = json.loads(index_file.read_text())
        weight_map: dict[str, str] = index["weight_map"]
    except (OSError, ValueError, KeyError) as exc:
        raise ModelError(f"{index_file} is corrupt: {type(exc).__name__}: {exc}") from exc
    if needed is not None:
        weight_map = {key: shard for key, shard in weight_map.items() if not _is_other_block(key, *needed)}
    shards = sorted(set(weight_map.values()))
    folder = folder if folder.is_dir() else _download(source, shards)
    missing = [name for name in shards if not (folder / name).exists()]
    if missing:
        raise ModelError(
            f"{folder / missing[0]} is missing; {index_file.name} says that it holds weights that are needed"
        )
    _check_headers([folder / name for name in shards])
    with tempfile.TemporaryDirectory(prefix="layertap-") as view:
        for name in shards:
            target = Path(view, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to((folder / name).resolve())
        Path(view, index_file.name).write_text(json.dumps({**index, "weight_map": weight_map}))
        yield view


def _index_file(source: ModelSource) -> Path | None:
    folder = Path(source.path)
    if folder.is_dir():
        if (folder / "model.safetensors").exists():
            return None
        return next((folder / name for name in _INDEX_FILES if (folder / name).exists()), None)
    from transformers.utils import cached_file

    options: dict[str, Any] = {"revision": source.revision, "_raise_exceptions_for_missing_entries": False}
    found = (cached_file(source.path, name, **options) for name in _INDEX_FILES)
    return next((Path(file) for file in found if file), None)


def _download(source: ModelSource, shards: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source.path, revision=source.revision, allow_patterns=[*shards, "*.json"]))


def _is_other_block(key: str, path: str, real: range) -> bool:
    """Whether a tensor of the checkpoint belongs to a block that isn't needed, with or without the base model's prefix."""
    _, _, short = path.partition(".")
    for prefix in {path, short} - {""}:
        found = re.match(rf"{re.escape(prefix)}\.(\d+)\.", key)
        if found:
            return int(found[1]) not in real
    return False


def _check_headers(files: list[Path]) -> None:
    from safetensors import SafetensorError, safe_open

    for file in files:
        if file.suffix != ".safetensors":
            continue
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as exc:
            raise ModelError(f"{file} is corrupt: {exc}") from exc


def _refuse_random_weights(source: ModelSource, report: dict[str, Any]) -> None:
    for kind, what in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape for")):
        names = sorted(str(name) for name in report.get(kind) or ())
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ModelError(f"the checkpoint {source.name} {what} {len(names)} tensors that the model needs: {shown}")
