"""The weights of one model, read only as deep as somebody asked.

Blocks deeper than `depth`, an untied head and towers for pictures or sound are *placeholders* without parameters in a
subclass of the model's own class, so that transformers' loader finds no place for their tensors and never reads them, while
every number in the configuration stays what it is. A deeper call reads the missing blocks and takes over those that are there.
A checkpoint that lacks a needed tensor is an error: a randomly initialised weight is never used (but for `load_format="dummy"`).

Blocks that don't fit the device's memory are read a few at a time and kept in host memory (see `offload`).
"""

from __future__ import annotations

import copy
import gc
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from layertap.capture.blocks import Blocks, find_blocks
from layertap.capture.residual import Residual, find_residual
from layertap.engines.transformers.budget import fits
from layertap.engines.transformers.checkpoint import checkpoint_for
from layertap.engines.transformers.dummy import random_model
from layertap.engines.transformers.load import ModelSource
from layertap.engines.transformers.offload import SLOTS, Streamer, flat_bytes
from layertap.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Layout", "Placeholder", "Weights"]

logger = logging.getLogger(__name__)

_GROUP_BYTES = 4 * 2**30
"""Of blocks that are read together on their way to host memory."""


class Placeholder(nn.Module):
    """Stands for a module whose weights nobody needs; it keeps the plain attributes that its parent may look at."""

    def __init__(self, original: nn.Module, source: ModelSource) -> None:
        super().__init__()
        self.device, self.dtype = source.device, source.dtype
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
        self.streamer: Streamer | None = None
        """Brings the weights of blocks that aren't on the device, if there are any."""

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of a copy, placeholders among them."""
        return [model.get_submodule(name) for name in self.names]

    def residual_of(self, model: nn.Module) -> Residual:
        """How a copy carries its stream; models with several streams make one of them with modules of their own."""
        config: Any = model.config
        decoder = model.get_submodule(self.found.decoder_path)
        return find_residual(decoder, self.found.blocks, config.get_text_config(decoder=True), self.found.hidden_size)


class Weights:
    """The weights of one model, grown on demand and never shrunk. Thread-safe.

    Args:
        source: the model.
        room: device memory for the model and its work; weights that don't fit in it stay in host memory. None is any amount.
        dummy: random weights instead of the checkpoint's.
    """

    def __init__(self, source: ModelSource, *, room: int | None = None, dummy: bool = False) -> None:
        self.source = source
        self.room = room
        self._dummy = dummy
        self._lock = threading.Lock()
        self._model: PreTrainedModel | None = None
        self._depth = 0
        self._complete = False
        shape = _build_on_meta(source)
        self.layout = Layout(shape)
        self._tied = _ties_cross_blocks(shape, self.layout.path)
        self.num_layers = len(self.layout.names)
        self.block_bytes = tuple(flat_bytes(block.parameters(), source.dtype) for block in self.layout.blocks_of(shape))
        self.all_bytes = flat_bytes(shape.parameters(), source.dtype)
        self.other_bytes = self._bytes_besides_blocks(shape)

    @property
    def depth(self) -> int:
        """How many blocks are loaded."""
        return self._depth

    @property
    def streamer(self) -> Streamer | None:
        """Brings blocks from host memory, if not all of them fit the device's."""
        return self.layout.streamer

    def at_least(self, depth: int, *, complete: bool = False) -> PreTrainedModel:
        """Return the model with its first `depth` blocks loaded.

        Args:
            depth: blocks needed.
            complete: everything, the head too, as generation needs it.

        Raises:
            ModelError: a weight file is missing, corrupt, or lacks a tensor; or there is too little memory.
        """
        with self._lock:
            if complete and not self._complete:
                if self.streamer is not None or (self.room is not None and self.all_bytes > self.room):
                    raise ModelError(
                        f"{self.source.name}: generation needs all weights on the device, {_gib(self.all_bytes)}, and there "
                        f"is {_gib(self.room or 0)}: only extraction runs with weights in host memory; engine='vllm' "
                        "generates on several GPUs"
                    )
                self._model, self._depth = self._load(range(self.num_layers), complete=True), self.num_layers
                self._complete = True
            elif self._model is None or depth > self._depth:
                self._model = self._deepen(depth)
                self._depth = depth
            return self._model

    def _bytes_besides_blocks(self, shape: PreTrainedModel) -> int:
        tied = dict(getattr(shape, "all_tied_weights_keys", None) or {})
        left_out = tuple(f"{name}." for name in _not_needed(shape, self.layout, range(0), tied))
        kept = [parameter for name, parameter in shape.named_parameters() if not name.startswith(left_out)]
        return flat_bytes(kept, self.source.dtype)

    def forget(self) -> None:
        """Drop what is loaded: a model that writes to its own weights has spoiled them."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._model, self._depth, self._complete = None, 0, False
        self.layout.streamer = None
        gc.collect()  # modules and their hooks hold one another

    def _deepen(self, depth: int) -> PreTrainedModel:
        if not fits(self.other_bytes + sum(self.block_bytes[:depth]), self.room) and self._can_stream():
            self._forget()
            return self._load_streamed(depth)
        old = self._model
        if old is None or self._tied:
            return self._load(range(depth), complete=False)
        fresh = self._load(range(self._depth, depth), complete=False)
        self._take_over(fresh, old, range(self._depth))
        return fresh

    def _take_over(self, model: PreTrainedModel, other: PreTrainedModel, blocks: range) -> None:
        for index in blocks:
            name = self.layout.names[index]
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, other.get_submodule(name))

    def _can_stream(self) -> bool:
        why = None
        if self._tied:
            why = "its blocks share weights with one another"
        elif self.source.quantization is not None and self.source.gguf_file is None:
            why = f"it is quantized ({self.source.quantization})"
        if why is not None:
            logger.warning("%s may not fit the device's memory; since %s, it can't be streamed", self.source.name, why)
        return why is None

    def _load_streamed(self, depth: int) -> PreTrainedModel:
        """Blocks go to host memory a few at a time; beside them never more than those few are in memory a second time."""
        slot = max(self.block_bytes)
        room = self.room or 0
        if self.other_bytes + SLOTS * slot > room:
            raise ModelError(
                f"{self.source.name}: {_gib(room)} of device memory are too little: embeddings and the like take "
                f"{_gib(self.other_bytes)}, and {SLOTS} blocks must fit, {_gib(slot)} each"
            )
        host_bytes = sum(self.block_bytes[:depth])
        available = _available_host_memory()
        if available is not None and host_bytes > available:
            logger.warning("%s are needed in host memory, %s are available", _gib(host_bytes), _gib(available))
        logger.info("%s: weights of %d blocks, %s, go to host memory", self.source.name, depth, _gib(host_bytes))
        model = self._load(range(0), complete=False)
        streamer = Streamer(self.source.device, slot)
        group = max(1, min(_GROUP_BYTES, (room - self.other_bytes - SLOTS * slot) // 2) // slot)
        group = depth if self.source.gguf_file else group  # of a GGUF file all tensors are read each time
        for begin in range(0, depth, group):
            some = range(begin, min(begin + group, depth))
            part = self._load(some, complete=False, only_blocks=True)
            for index in some:
                streamer.adopt(index, part.get_submodule(self.layout.names[index]))
            self._take_over(model, part, some)
        streamer.arrange()
        self.layout.streamer = streamer
        return model

    def _load(self, real: range, *, complete: bool, only_blocks: bool = False) -> PreTrainedModel:
        source = self.source
        cls = source.model_class if complete else _partial_class(source, self.layout, real, only_blocks)
        if complete or len(real) == self.num_layers:
            logger.info("%s: loading all %d blocks in %s", source.name, self.num_layers, source.dtype)
        elif real:
            logger.info(
                "%s: loading blocks %d to %d of %d in %s",
                source.name,
                real.start,
                real.stop - 1,
                self.num_layers,
                source.dtype,
            )
        if self._dummy:
            names = {index: self.layout.names[index] for index in real}
            return random_model(source, cls, self.layout.found.decoder_path, names).requires_grad_(False).eval()
        options: dict[str, Any] = {"dtype": source.dtype, "config": source.config, "output_loading_info": True}
        options["ignore_mismatched_sizes"] = (
            True  # said with the tensor's name below, where transformers says only that
        )
        if source.device.type != "cpu" and not only_blocks:
            options["device_map"] = {"": source.device}
        if source.gguf_file:
            from transformers import GgufConfig

            options |= {"gguf_file": source.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
        keep_all = complete or len(real) == self.num_layers
        with checkpoint_for(source, None if keep_all else (self.layout.path, real)) as path:
            try:
                model, report = cls.from_pretrained(path, revision=source.revision, **options)
            except Exception as exc:
                raise ModelError(f"can't load the weights of {source.name}: {type(exc).__name__}: {exc}") from exc
        _refuse_random_weights(source, report)
        model.config.name_or_path = source.path
        model.requires_grad_(False)
        return model.eval()


def _available_host_memory() -> int | None:
    """Bytes, where Linux says so."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3g} GiB"


def _build_on_meta(source: ModelSource) -> PreTrainedModel:
    with torch.device("meta"):
        return source.model_class(copy.deepcopy(source.config))


def _ties_cross_blocks(model: PreTrainedModel, path: str) -> bool:
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return any(name.startswith(path + ".") for pair in tied.items() for name in pair)


def _partial_class(
    source: ModelSource, layout: Layout, real: range, only_blocks: bool = False
) -> type[PreTrainedModel]:
    """A subclass whose instances hold only the blocks in `real`, and no head or tower of their own.

    Args:
        source: the model.
        layout: where its blocks are.
        real: the blocks that are wanted.
        only_blocks: no embeddings and the like, either.
    """
    cls = source.model_class

    def init(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        tied = dict(getattr(self, "all_tied_weights_keys", None) or {})
        left_out = _not_needed(self, layout, real, tied)
        for name in [*left_out, *(_besides_blocks(self, layout) if only_blocks else ())]:
            parent, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(parent), leaf, Placeholder(self.get_submodule(name), source))
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


def _besides_blocks(model: PreTrainedModel, layout: Layout) -> list[str]:
    """Modules with weights that neither are blocks nor hold them, the largest of each."""
    found: list[str] = []
    for name, module in model.named_modules():
        above = f"{layout.path}.".startswith(f"{name}.") or not name
        if above or f"{name}.".startswith(f"{layout.path}.") or any(name.startswith(f"{one}.") for one in found):
            continue
        if next(module.parameters(), None) is not None:
            found.append(name)
    return found


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


def _refuse_random_weights(source: ModelSource, report: dict[str, Any]) -> None:
    for kind, what in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape for")):
        names = sorted(str(name) for name in report.get(kind) or ())
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ModelError(f"the checkpoint {source.name} {what} {len(names)} tensors that the model needs: {shown}")
