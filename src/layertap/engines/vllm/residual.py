"""Which of a block's outputs is the residual stream: decided by numbers at load, never by a model's name.

vLLM's fused models return (h, r) and the stream is h + r. Others return an h that is summed already beside a stale r, or a bare
tensor. The test runs a small forward without KV cache, with noise fed into the first and the last block and put in the place of
what attention and state-space layers return (which is uninitialised memory then), keeps what the last block returned, and asks the
module that runs next, the final norm: `norm(x)` equals what it put out for exactly one of x = h and x = h + r. A model where that
is undecided is refused.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from layertap.engines.vllm.layers import Blocks
from layertap.errors import UnsupportedModelError

Rule = Literal["sum", "first"]
Form = Literal["tensor", "pair", "single", "other"]

_CLOSE, _FAR = 0.02, 0.1
_SEED = 20261130


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """How the stream enters a block that isn't given what the block before it put out (the model adds to it in between).

    Attributes:
        hidden: where the hidden states stand among the block's arguments: an index or a name; None: not found.
        residual: where the residual stands.
        same_hidden: the hidden states are what the block before put out, untouched.
        same_residual: so is the residual.
    """

    hidden: int | str | None
    residual: int | str | None
    same_hidden: bool
    same_residual: bool


@dataclass(slots=True)
class Seen:
    """What a probe forward showed.

    Attributes:
        forms: block index to the form of its output.
        hidden_argument: where the first block's hidden states stand among its arguments: an index or a name.
        candidates: of the last block: "first" and, for pairs, "sum".
        reader: the module that ran next, and what it put out.
        entries: of the blocks that aren't simply given what the block before put out.
    """

    forms: dict[int, Form] = field(default_factory=dict)
    hidden_argument: int | str | None = None
    candidates: dict[Rule, torch.Tensor] = field(default_factory=dict)
    reader: nn.Module | None = None
    reader_output: torch.Tensor | None = None
    entries: dict[int, Entry] = field(default_factory=dict)


def probe(
    model: nn.Module, blocks: Blocks, hidden_size: int, mixers: Iterable[nn.Module], forward: Callable[[], Any]
) -> tuple[Seen, Any]:
    """Run `forward` on noise and watch the blocks and what runs after the last.

    Args:
        model: the whole model.
        blocks: its blocks.
        hidden_size: width of the stream.
        mixers: the attention and state-space layers that vLLM registered.
        forward: runs the model on a few tokens.
    """
    seen = Seen()
    first, last = min(blocks.local), max(blocks.local)
    inside = {id(module) for block in blocks.local.values() for module in block.modules()}
    containers = _ancestors(model, blocks)
    handles: list[Any] = []
    replaced: list[Any] = [mixer for mixer in mixers if isinstance(mixer, nn.Module) and "forward" not in vars(mixer)]
    generator = torch.Generator(device="cpu").manual_seed(_SEED)  # the same on every rank

    def noise(value: torch.Tensor) -> torch.Tensor:
        fresh = torch.randn(value.shape, generator=generator, dtype=torch.float32)
        return fresh.to(device=value.device, dtype=value.dtype)

    def feed_noise(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def fed(value: Any) -> Any:
            return noise(value) if _is_stream(value, hidden_size) else value

        if module is not blocks.local[first]:
            return tuple(map(fed, args)), {name: fed(value) for name, value in kwargs.items()}
        places: list[int | str] = [i for i, value in enumerate(args) if _is_stream(value, hidden_size)]
        places += [name for name, value in kwargs.items() if _is_stream(value, hidden_size)]
        named = [place for place in places if place == "hidden_states"]
        seen.hidden_argument = named[0] if named else (places[0] if places else None)
        return tuple(map(fed, args)), {name: fed(value) for name, value in kwargs.items()}

    def mixed(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                output = original(*args, **kwargs)
            except RuntimeError:  # some layers of vLLM's CPU build can't run without a cache; the noise will do
                output = None
            if isinstance(output, torch.Tensor) and output.is_floating_point():
                return noise(output)
            target = kwargs.get("output", args[-1] if args else None)
            if output is None and isinstance(target, torch.Tensor) and target.is_floating_point():
                target.copy_(noise(target))
            return output

        return forward

    outputs: dict[int, Any] = {}

    def watch_entry(index: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            entry = _entry({**dict(enumerate(args)), **kwargs}, outputs.pop(index - 1, None), hidden_size)
            if entry is not None:
                seen.entries[index] = entry

        return hook

    def watch(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs[index] = output
            seen.forms[index] = _form(output, hidden_size)
            if index == last:
                seen.candidates = _candidates(output, hidden_size)

        return hook

    def watch_reader(module: nn.Module, args: Any, output: Any) -> None:
        if not seen.candidates or seen.reader is not None:
            return
        value = output[0] if isinstance(output, tuple) else output
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            seen.reader, seen.reader_output = module, value.detach().clone()

    try:
        handles += [
            block.register_forward_pre_hook(watch_entry(index), with_kwargs=True)
            for index, block in blocks.local.items()
        ]
        for index in {first, last}:
            handles.append(blocks.local[index].register_forward_pre_hook(feed_noise, with_kwargs=True))
        for mixer in replaced:
            mixer.forward = mixed(mixer.forward)  # not a hook: vLLM's Transformers backend calls forward itself
        handles += [block.register_forward_hook(watch(index)) for index, block in blocks.local.items()]
        handles += [
            module.register_forward_hook(watch_reader)
            for module in model.modules()
            if id(module) not in inside and id(module) not in containers and not isinstance(module, nn.ModuleList)
        ]
        with _uncompiled(model):
            output = forward()
    finally:
        for handle in handles:
            handle.remove()
        for mixer in replaced:
            vars(mixer).pop("forward", None)
    return seen, output


def decide(seen: Seen, model_output: torch.Tensor | None, name: str) -> Rule:
    """Which candidate of the last block is the stream.

    Args:
        seen: of the last pipeline stage.
        model_output: the model's hidden states, read where nothing runs after the last block.
        name: the model's name for messages.

    Raises:
        UnsupportedModelError: undecided; the message has the numbers.
    """
    if not seen.candidates:
        raise UnsupportedModelError(f"{name}: its last block returned no tensor of the residual stream's width")
    if seen.reader is not None and seen.reader_output is not None:
        reader, target, by = seen.reader, seen.reader_output, type(seen.reader).__name__
        errors = {rule: _error(_apply(reader, value), target) for rule, value in seen.candidates.items()}
    elif model_output is not None:
        by = "the model's output"
        errors = {rule: _error(value, model_output) for rule, value in seen.candidates.items()}
    else:
        raise UnsupportedModelError(f"{name}: nothing that reads the last block's output was seen")
    close = [rule for rule, error in errors.items() if error < _CLOSE]
    if len(close) == 1 and all(error > _FAR for rule, error in errors.items() if rule != close[0]):
        return close[0]
    shown = ", ".join(f"{_CANDIDATE_NAMES[rule]}: {error:.2g}" for rule, error in errors.items())
    raise UnsupportedModelError(
        f"{name}: which output of its blocks is the residual stream can't be decided; relative errors against {by}: {shown} "
        f"(right means below {_CLOSE} for one and above {_FAR} for the other)"
    )


_CANDIDATE_NAMES: dict[Rule, str] = {"first": "first output", "sum": "sum of both outputs"}


def check_forms(forms: dict[int, Form], last_form: Form, rule: Rule, name: str) -> None:
    """Refuse a model whose blocks return other things than its last block, on which the rule was decided.

    Raises:
        UnsupportedModelError: it names the blocks.
    """
    odd: dict[int, Form] = {index: form for index, form in forms.items() if form == "other"}
    if rule == "sum" or last_form == "pair":
        odd |= {index: form for index, form in forms.items() if form != last_form}
    elif any(form == "pair" for form in forms.values()):
        odd |= {index: form for index, form in forms.items() if form == "pair"}
    if odd:
        raise UnsupportedModelError(
            f"{name}: blocks {sorted(odd)} return {sorted(set(odd.values()))}, the last block returns {last_form!r}: the "
            "residual stream between them isn't certain"
        )


def input_tap(index: int, entry: Entry | None, rule: Rule, name: str) -> tuple[int | str, int | str | None] | None:
    """Where the stream is to be read at the entry of a block; None where what the block before put out is the same.

    Raises:
        UnsupportedModelError: it isn't the same, and can't be found among the block's arguments.
    """
    if entry is None or (entry.same_hidden and (rule == "first" or entry.same_residual)):
        return None
    if entry.hidden is None or (rule == "sum" and entry.residual is None):
        raise UnsupportedModelError(
            f"{name}: layer {index}: the model changes the stream between blocks {index - 1} and {index}, and what enters "
            f"block {index} can't be told from its arguments; leave the layer out"
        )
    return entry.hidden, entry.residual if rule == "sum" else None


def _entry(given: dict[int | str, Any], output: Any, hidden_size: int) -> Entry | None:
    """Compare a block's arguments with what the block before put out, by identity: even a copy may have been added to."""
    if output is None:
        return None
    before = output if isinstance(output, tuple) else (output,)
    places = {id(value): place for place, value in given.items()}
    hidden = places.get(id(before[0]))
    pair = _form(output, hidden_size) == "pair"
    residual = places.get(id(before[1])) if pair else None
    if hidden is not None and (residual is not None or not pair):
        return None
    same_hidden, same_residual = hidden is not None, residual is not None
    streams = [place for place, value in given.items() if _is_stream(value, hidden_size)]
    if residual is None and pair:
        residual = "residual" if "residual" in streams else streams[1] if len(streams) == 2 else None
    if hidden is None:
        others = [place for place in streams if place != residual]
        hidden = "hidden_states" if "hidden_states" in others else others[0] if len(others) == 1 else None
    return Entry(hidden=hidden, residual=residual, same_hidden=same_hidden, same_residual=same_residual)


def _form(output: Any, hidden_size: int) -> Form:
    if _is_rows(output, hidden_size):
        return "tensor"
    if isinstance(output, tuple) and output and _is_rows(output[0], hidden_size):
        if len(output) > 1 and _is_rows(output[1], hidden_size):
            return "pair"
        return "single"
    return "other"


def _candidates(output: Any, hidden_size: int) -> dict[Rule, torch.Tensor]:
    form = _form(output, hidden_size)
    if form == "other":
        return {}
    if form == "tensor":
        return {"first": output.detach().clone()}
    candidates: dict[Rule, torch.Tensor] = {"first": output[0].detach().clone()}
    if form == "pair":
        candidates["sum"] = (output[0] + output[1]).detach().clone()
    return candidates


def _apply(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        output = module(value.clone())
    result: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return result


def _error(value: torch.Tensor, target: torch.Tensor) -> float:
    if value.numel() != target.numel():
        return float("inf")
    a, b = value.reshape(-1).float(), target.reshape(-1).float()
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def _is_stream(value: Any, hidden_size: int) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.ndim >= 2
        and value.shape[-1] == hidden_size
    )


def _is_rows(value: Any, hidden_size: int) -> bool:
    # [tokens, hidden], or [1, tokens, hidden] from vLLM's Transformers backend; several streams would be [n, tokens, hidden]
    return _is_stream(value, hidden_size) and (value.ndim == 2 or (value.ndim == 3 and value.shape[0] == 1))


def _ancestors(model: nn.Module, blocks: Blocks) -> set[int]:
    found, module = {id(model)}, model
    for part in blocks.path.split("."):
        module = getattr(module, part)
        found.add(id(module))
    return found


class _uncompiled:
    """Run the modules that vLLM compiles without compiling them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in model.modules() if getattr(m, "do_not_compile", None) is False]

    def __enter__(self) -> None:
        for module in self._modules:
            module.do_not_compile = True  # type: ignore[assignment]

    def __exit__(self, *exc: object) -> None:
        for module in self._modules:
            module.do_not_compile = False  # type: ignore[assignment]
