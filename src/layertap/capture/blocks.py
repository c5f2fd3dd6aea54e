"""Find the decoder blocks of any model by its structure, and say what was found and why.

No table of model names: candidates are the lists of modules in which every element holds a norm and weight matrices.
Those inside another candidate's elements (experts), in an encoder, or under a vision or audio configuration are out; of
the rest the one counts whose length the text configuration gives. If that leaves none or several, the model is refused
and the message lists them.
Works on the meta device: nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layertap.capture.residual import Residual, find_residual, is_norm
from layertap.errors import UnsupportedModelError

_COUNTS = ("num_hidden_layers", "num_decoder_layers", "decoder_layers", "num_layers")
_EXTRA_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A list of modules that was looked at."""

    path: str
    length: int
    classes: tuple[str, ...]
    verdict: str
    """Why it is the decoder's list of blocks, or why it isn't."""
    eligible: bool

    def __str__(self) -> str:
        return f"{self.path}: {self.length} x {'/'.join(self.classes)} - {self.verdict}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """The decoder blocks of a model in the order in which they run, and how they carry the residual stream.

    Example:
        >>> from layertap.testing import zoo
        >>> find_blocks(zoo.build("gpt2")).container_path
        'transformer.h'
    """

    container_path: str
    blocks: list[nn.Module]
    decoder: nn.Module
    """The module whose forward runs the blocks."""
    decoder_path: str
    hidden_size: int | None
    residual: Residual
    reasons: list[str]
    candidates: list[Candidate]

    @property
    def num_layers(self) -> int:
        """How many blocks there are; also the layer id of the last block's output."""
        return len(self.blocks)

    def entering(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Return the stream [batch, tokens, hidden] that enters a block called with these arguments."""
        return self.residual.entering(args, kwargs)

    def leaving(self, output: Any) -> torch.Tensor:
        """Return the stream [batch, tokens, hidden] that leaves a block that returned `output`."""
        return self.residual.leaving(output)

    def stream_of(self, value: Any) -> torch.Tensor:
        """Turn a block's raw input or output tensor into the one stream that is saved."""
        return self.residual.stream_of(value)

    def __str__(self) -> str:
        lines = [
            f"{self.num_layers} blocks at {self.container_path} ({'/'.join(_classes(self.blocks))}), "
            f"run by {self.decoder_path or '(the model itself)'} ({type(self.decoder).__name__})",
            *(f"  because {reason}" for reason in self.reasons),
            f"  stream: {self.residual.note}; taken from the blocks' argument {self.residual.parameter!r}",
            *(f"  not {candidate}" for candidate in self.candidates if candidate.path != self.container_path),
        ]
        return "\n".join(lines)


def find_blocks(model: nn.Module) -> Blocks:
    """Find the text decoder's blocks, or raise UnsupportedModelError with the candidates."""
    text = text_config(model)
    counts = _expected_counts(model, text)
    root, root_reason = _decoder_root(model)
    candidates = [_judge(model, path, found, root, text) for path, found in _module_lists(model)]
    eligible = [candidate for candidate in candidates if candidate.eligible]
    chosen = [c for c in eligible if c.length in counts.values()] if counts else eligible
    extra = 0
    if not chosen and len(eligible) == 1:
        extra = _predicting_extra(text, eligible[0].length, counts)
        chosen = eligible if extra else []
    if len(chosen) != 1:
        raise UnsupportedModelError(_refusal(model, counts, chosen, candidates))
    path = chosen[0].path
    blocks = _elements(model.get_submodule(path))
    reasons = [root_reason] if root_reason else []
    reasons.append(f"it is the only list of blocks there that fits ({chosen[0].verdict})")
    if counts:
        fields = ", ".join(name for name, value in counts.items() if value == len(blocks) - extra)
        reasons.append(f"its length {len(blocks) - extra} is that of the configuration ({fields})")
    if extra:
        reasons.append(f"its last {extra} are extra multi-token-prediction layers and are left out")
        blocks = blocks[:-extra]
    if len({id(block) for block in blocks}) < len(blocks):
        raise UnsupportedModelError(
            f"{path} runs the same module at several depths, so its calls can't be told apart by module:\n"
            + "\n".join(f"  {candidate}" for candidate in candidates)
        )
    decoder_path = path.rpartition(".")[0]
    decoder = model.get_submodule(decoder_path)
    hidden_size = getattr(text, "hidden_size", None)
    hidden_size = hidden_size if isinstance(hidden_size, int) else None
    return Blocks(
        container_path=path,
        blocks=blocks,
        decoder=decoder,
        decoder_path=decoder_path,
        hidden_size=hidden_size,
        residual=find_residual(decoder, blocks, text, hidden_size),
        reasons=reasons,
        candidates=candidates,
    )


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the model's text decoder, its only configuration, or None."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _expected_counts(model: nn.Module, text: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for config in (text, getattr(model, "config", None)):
        for name in _COUNTS:
            value = getattr(config, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                counts.setdefault(name, value)
    decoder_side = {name: value for name, value in counts.items() if name in ("num_decoder_layers", "decoder_layers")}
    own = getattr(getattr(model, "config", None), "decoder_layers", None)
    if isinstance(
        own, int
    ):  # transformers fills decoder_layers of a derived text configuration with the class's default
        decoder_side["decoder_layers"] = own
    return decoder_side or counts


def _decoder_root(model: nn.Module) -> tuple[str, str]:
    """Path of the part that transformers calls the decoder, if it says so and that part holds lists of modules."""
    get_decoder = getattr(model, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    if isinstance(decoder, nn.Module) and decoder is not model:
        path = next((path for path, module in model.named_modules() if module is decoder), None)
        if path is not None and any(isinstance(module, nn.ModuleList) for module in decoder.modules()):
            return path, f"the model's get_decoder() is {path} ({type(decoder).__name__})"
    return "", ""


def _module_lists(model: nn.Module) -> list[tuple[str, nn.Module]]:
    lists = [
        (path, module)
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(module) > 0
    ]
    outer = [(path, module) for path, module in lists if all(_is_block(child) for child in module.children())]
    return [
        (path, module) for path, module in lists if not any(path.startswith(f"{other}.") for other, _ in outer if other)
    ]


def _elements(container: nn.Module) -> list[nn.Module]:
    """The elements of a list of modules; unlike children(), one that stands twice comes twice."""
    return [module for module in container._modules.values() if module is not None]


def _is_block(module: nn.Module) -> bool:
    norms = any(is_norm(part) for part in module.modules() if part is not module)
    return norms and sum(1 for _ in _matrices(module)) >= 2


def _matrices(module: nn.Module) -> Iterator[torch.Tensor]:
    """Weights; quantized ones (GPTQ, AWQ) may be buffers of codes."""
    yield from (parameter for parameter in module.parameters() if parameter.ndim >= 2)
    for buffer in module.buffers():
        if buffer.ndim >= 2 and not (buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.bool):
            yield buffer


def _judge(model: nn.Module, path: str, found: nn.Module, root: str, text: Any) -> Candidate:
    children = _elements(found)
    verdict, eligible = "every element holds a norm and weight matrices", True
    owner = _foreign_config(model, path, text)
    if not all(_is_block(child) for child in children):
        verdict, eligible = "not blocks: some element has no norm or less than two weight matrices", False
    elif root and not f"{path}.".startswith(f"{root}."):
        verdict, eligible = f"outside of the text decoder {root}", False
    elif owner:
        verdict, eligible = f"belongs to {owner}, not to the text decoder", False
    return Candidate(path=path, length=len(children), classes=_classes(children), verdict=verdict, eligible=eligible)


def _foreign_config(model: nn.Module, path: str, text: Any) -> str:
    """Name the configuration of the closest ancestor that has one, if that isn't the text decoder's."""
    own = {id(text), id(getattr(model, "config", None))}
    kinds = {type(text)} - {type(None)}
    while path:
        path = path.rpartition(".")[0]
        config = getattr(model.get_submodule(path), "config", None)
        if config is not None and not isinstance(config, nn.Module):
            return "" if id(config) in own or type(config) in kinds else type(config).__name__
    return ""


def _predicting_extra(text: Any, length: int, counts: Mapping[str, int]) -> int:
    for name in _EXTRA_COUNTS:
        extra = getattr(text, name, None)
        if isinstance(extra, int) and extra > 0 and length - extra in counts.values():
            return extra
    return 0


def _classes(blocks: Sequence[nn.Module]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(type(block).__name__ for block in blocks))


def _refusal(
    model: nn.Module, counts: Mapping[str, int], chosen: Sequence[Candidate], candidates: Sequence[Candidate]
) -> str:
    wanted = ", ".join(f"{name}={value}" for name, value in counts.items()) or "no number of layers"
    problem = f"{len(chosen)} lists fit" if chosen else "no list of blocks fits"
    listed = "\n".join(f"  {candidate}" for candidate in candidates) or "  (no list of modules at all)"
    return (
        f"the decoder blocks of {type(model).__name__} can't be found with certainty: {problem}; the configuration gives {wanted}. "
        f"Candidates:\n{listed}"
    )
