"""One forward over some sequences, by the way they may share it: packed end to end (also with what they have in common at their
beginnings once), right-padded, or alone.

`Passes` holds the private views of a model that extraction runs (packed attention; the model's own) and the tap between them and a
tensor [rows, layers, hidden]. Extraction and the self-test that decides about ways run exactly the same code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layertap.capture.spans import Spans
from layertap.engines.base import TokenIds
from layertap.engines.transformers.attention import (
    IMPLEMENTATION,
    Pack,
    configurations,
    length_dependent,
    packed,
    private_view,
    register,
)
from layertap.engines.transformers.copies import to_device
from layertap.engines.transformers.packing import Way
from layertap.engines.transformers.tap import Piece, Tap, run_to_exit
from layertap.engines.transformers.trees import Tree

if TYPE_CHECKING:
    from layertap.engines.transformers.weights import Layout

__all__ = ["Passes", "length_limit"]

_CPU_ROWS = 32


class Passes:
    """The ways through one model.

    Args:
        model: the model, loaded as deep as the layers that will be asked for. It is not changed.
        layout: where its blocks are.
        attention: implementation for what isn't packed; None leaves the model's own.
        adapt: changes a view before it runs (the self-test shrinks windows).
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        attention: str | None = None,
        adapt: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.model = model
        self.layout = layout
        self.device = next(model.parameters()).device
        self._attention = attention
        self._adapt = adapt
        accepted = inspect.signature(model.forward).parameters
        self._options = {"use_cache": False} if "use_cache" in accepted or _takes_any(accepted) else {}
        self._pad = _pad_id(model)

    def _view(self, implementation: str | None) -> nn.Module:
        view = private_view(self.model, implementation)
        if self._adapt is not None:
            self._adapt(view)
        return view

    @cached_property
    def _plain(self) -> _View:
        return _View(self._view(self._attention), self.layout)

    @cached_property
    def _packed(self) -> _View:
        register()
        return _View(self._view(IMPLEMENTATION), self.layout)

    def run(
        self, way: Way, sequences: Sequence[TokenIds], wanted: Sequence[range], layers: Sequence[int], rows: Tensor
    ) -> None:
        """Run sequences in one forward and put the wanted rows of each, one after the other, into `rows`.

        Args:
            way: how they share the forward; "alone" is for one sequence. With "shared", `rows` takes those of `Tree.of(sequences)`,
                whatever is wanted.
            sequences: token ids.
            wanted: the positions of each whose rows are wanted.
            layers: layer ids; slot i of `rows` takes layers[i].
            rows: [rows, layers, hidden] on the model's device.
        """
        view = self._packed if way in ("packed", "shared") else self._plain
        view.restore_rotary()
        if way == "packed":
            self._run_packed(view, sequences, [range(len(one)) for one in sequences], wanted, layers, rows)
            return
        if way == "shared":
            tree = Tree.of(sequences)
            self._run_packed(view, sequences, tree.own, tree.own, layers, rows, tree.rows)
            return
        longest = max(len(sequence) for sequence in sequences)
        ids = torch.full((len(sequences), longest), self._pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, sequence in enumerate(sequences):
            ids[i, : len(sequence)] = torch.as_tensor(sequence)
            mask[i, : len(sequence)] = 1
        inputs: dict[str, Any] = {"input_ids": to_device(ids, self.device)}
        if way == "padded":
            inputs["attention_mask"] = to_device(mask, self.device)
        view.run(inputs | self._options, layers, rows, _pieces(wanted, [(i, 0) for i in range(len(sequences))]))

    def run_itself(self, sequence: TokenIds, layers: Sequence[int], rows: Tensor) -> None:
        """Run one sequence through the model itself instead of a view.

        Args:
            sequence: token ids; all their rows are wanted.
            layers: layer ids; slot i of `rows` takes layers[i].
            rows: [rows, layers, hidden] on the model's device.
        """
        view = _View(self.model, self.layout)
        ids = torch.as_tensor(sequence, dtype=torch.int64)[None]
        try:
            inputs = {"input_ids": to_device(ids, self.device)} | self._options
            view.run(inputs, layers, rows, _pieces([range(len(sequence))], [(0, 0)]))
        finally:
            view.close()

    def _run_packed(
        self,
        view: _View,
        sequences: Sequence[TokenIds],
        own: Sequence[range],
        wanted: Sequence[range],
        layers: Sequence[int],
        rows: Tensor,
        seen: Sequence[Spans] | None = None,
    ) -> None:
        """Run the positions `own` of each; where these aren't all of them, `seen` are the rows of the pack that each one sees."""
        if self.device.type == "cpu":
            company = _company(sum(map(len, own)), sequences[0])
            if seen is not None:
                begins = [*accumulate(map(len, company), initial=sum(map(len, own)))]
                seen = [*seen, *(((begin, end),) for begin, end in pairwise(begins))]
            sequences, own = [*sequences, *company], [*own, *(range(len(one)) for one in company)]
            wanted = [*wanted, *(range(0) for _ in company)]
        run = zip(sequences, own, strict=True)
        ids = torch.cat([torch.as_tensor(one[part.start : part.stop], dtype=torch.int64) for one, part in run])[None]
        positions = torch.cat([torch.arange(part.start, part.stop) for part in own])[None]
        pack = Pack.of([len(part) for part in own], self.device, seen)
        inputs: dict[str, Any] = {
            "input_ids": to_device(ids, self.device),
            "position_ids": to_device(positions, self.device),
        }
        places = [(0, begin - part.start) for begin, part in zip(pack.bounds, own, strict=False)]
        with packed(pack):
            view.run(inputs | self._options, layers, rows, _pieces(wanted, places))

    def compile_packed(self, **options: Any) -> None:
        """Compile the blocks of the packed view; lengths stay dynamic, the attention stays one opaque operator.

        Args:
            options: for torch.compile.
        """
        for block in self._packed.modules:
            block.forward = torch.compile(block.forward, dynamic=True, **options)


class _View:
    """A private view with its blocks, and the rotary state that it had when it was new."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model = model
        self.modules = layout.blocks_of(model)
        self._tap = Tap(self.modules, layout.residual_of(model))
        self._streamer = layout.streamer
        if self._streamer is not None:
            self._streamer.attach(self.modules)
        self._rotary = [
            (module, dict(module._buffers), _rotary_numbers(module))
            for module in model.modules()
            if length_dependent(module)
        ]

    def restore_rotary(self) -> None:
        """Undo what longer sequences left in rotary tables that grow, so that a row doesn't depend on what ran before."""
        for module, buffers, numbers in self._rotary:
            module._buffers.update(buffers)
            for name, value in numbers.items():
                setattr(module, name, value)

    def close(self) -> None:
        """Take the tap off."""
        self._tap.close()

    def run(self, inputs: dict[str, Any], layers: Sequence[int], rows: Tensor, pieces: Sequence[Piece]) -> None:
        ids = inputs["input_ids"]
        weights = nullcontext() if self._streamer is None else self._streamer.running(max(layers))
        with torch.no_grad(), weights, self._tap.into(rows, layers, pieces, (ids.shape[0], ids.shape[1])):
            run_to_exit(lambda: self.model(**inputs))


def _company(tokens: int, first: TokenIds) -> list[TokenIds]:
    """What fills a pack up to whole vectors, so that a row has the same bits whatever it is packed with.

    The CPU computes what is left over behind the last whole vector in another way, and very few rows with other kernels.
    """
    missing = -tokens % _CPU_ROWS
    full, rest = divmod(missing, len(first))
    return [first] * full + ([first[:rest]] if rest else [])


def length_limit(model: nn.Module) -> int | None:
    """Longest sequence whose rotary table is the original one, for models whose table depends on the longest sequence."""
    limits: list[int] = []
    if any(length_dependent(module) for module in model.modules()):
        for config in configurations(model):
            limits += _original_lengths(getattr(config, "rope_parameters", None))
        for module in model.modules():
            own = getattr(module, "original_max_seq_len", None)
            if length_dependent(module) and isinstance(own, int):
                limits.append(own)
    return min(limits) if limits else None


def _original_lengths(rope: Any) -> list[int]:
    if not isinstance(rope, dict):
        return []
    own = rope.get("original_max_position_embeddings")
    inner = [length for value in rope.values() for length in _original_lengths(value)]
    return inner + ([own] if isinstance(own, int) else [])


def _rotary_numbers(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if "max_seq_len_cached" in k or "attention_scaling" in k}


def _pieces(wanted: Sequence[range], places: Sequence[tuple[int, int]]) -> list[Piece]:
    """Where wanted rows lie in the stream and go in the arena; neighbours that stay neighbours become one copy."""
    pieces: list[Piece] = []
    row = 0
    for positions, (batch, offset) in zip(wanted, places, strict=True):
        if not positions:
            continue
        piece = Piece(batch, offset + positions.start, offset + positions.stop, row)
        row += len(positions)
        last = pieces[-1] if pieces else None
        if last is not None and (last.batch, last.end) == (piece.batch, piece.begin):
            pieces[-1] = Piece(last.batch, last.begin, piece.end, last.row)
        else:
            pieces.append(piece)
    return pieces


def _pad_id(model: nn.Module) -> int:
    config: Any = model.config
    pad = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
    return pad if isinstance(pad, int) and pad >= 0 else 0


def _takes_any(parameters: Any) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
