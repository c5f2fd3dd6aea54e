"""What one request asks for (`kv_transfer_params`), and what one sequence therefore owes its reader.

`RequestOptions` is the user's side, `Window` which positions, `CaptureSpec` the resolved order that engines and the
assembly work from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from layertap.capture import parsing
from layertap.capture.layers import LayersLike
from layertap.errors import OptionError

FP8 = "fp8_e4m3"
SAVE_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}
"""Dtypes of saved rows and their bytes per value."""
FP8_TAIL_BYTES = 8
"""What follows the values of an fp8 slot: the scale, a float32, and four zeros, so that 64-bit words stay aligned."""

EXPONENT_BITS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00, FP8: 0x7F}
"""All ones in these bits of a value mean infinity or NaN."""

Positions = Literal["last", "output"] | tuple[int, int]


def slot_bytes(dtype: str, hidden_size: int) -> int:
    """Bytes of one row in one layer.

    Raises:
        OptionError: rows of this width can't be saved in this dtype.
    """
    if dtype != FP8:
        return hidden_size * SAVE_DTYPES[dtype]
    if hidden_size % 8:
        raise OptionError(f"save_dtype: {FP8} takes hidden sizes that are multiples of 8, the model's is {hidden_size}")
    return hidden_size + FP8_TAIL_BYTES


def check_layers(value: Any) -> LayersLike:
    """Ids, a list of them, or a preset; resolved once the model is known."""
    if isinstance(value, bool) or not isinstance(value, int | str | list | tuple):
        raise ValueError("expected layer ids such as [2, 18, 33] or a preset such as 'eagle3'")
    return tuple(value) if isinstance(value, list) else value


def _positions(value: Any) -> Positions:
    if value in ("last", "output") and isinstance(value, str):
        return value  # type: ignore[return-value]
    if (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(end, int) and not isinstance(end, bool) for end in value)
    ):
        if not 0 <= value[0] < value[1]:
            raise ValueError("expected [a, b] with 0 <= a < b, absolute positions, b not included")
        return (value[0], value[1])
    raise ValueError("expected 'last', 'output' or [a, b]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The options of one request, as in `kv_transfer_params`."""

    hidden_states_path: str | None = parsing.option(
        None, parsing.optional(parsing.text), "where the file goes, if the server allows it"
    )
    include_output_tokens: bool = parsing.option(
        False, parsing.boolean, "also the rows of generated tokens, except the last, which never was an input"
    )
    layers: LayersLike | None = parsing.option(None, parsing.optional(check_layers), "layer ids or a preset")
    positions: Positions | None = parsing.option(
        None, parsing.optional(_positions), "'last', 'output' or [a, b]: only these rows"
    )
    save_dtype: str | None = parsing.option(
        None, parsing.optional(parsing.one_of(*SAVE_DTYPES)), "dtype of the saved rows"
    )
    overwrite: bool = parsing.option(False, parsing.boolean, "replace an existing file")
    tag: str | None = parsing.option(
        None, parsing.optional(parsing.text), "an id of the client's choice by which the result is found"
    )
    capture: bool | None = parsing.option(
        None, parsing.optional(parsing.boolean), "take hidden states of this request or not"
    )

    @classmethod
    def parse(cls, mapping: Mapping[str, Any] | None, *, foreign_keys_allowed: bool = False) -> "RequestOptions":
        """Check a request's `kv_transfer_params`.

        Raises:
            OptionError: an unknown key or a bad value; the message names it.
        """
        options = parsing.parse_fields(
            cls, {} if mapping is None else mapping, "kv_transfer_params", foreign_keys_allowed=foreign_keys_allowed
        )
        if options.tag is not None and not _is_plain_name(options.tag):
            raise OptionError(
                "kv_transfer_params.tag: expected at most 128 letters, digits, '.', '_' or '-', not starting with '.', "
                f"got {options.tag!r}"
            )
        return options

    @property
    def window(self) -> "Window":
        """Which positions are owed."""
        include_output = self.include_output_tokens or self.positions == "output"
        return Window(positions=self.positions, include_output=include_output)


def _is_plain_name(name: str) -> bool:
    return len(name) <= 128 and name[0] != "." and all((c.isascii() and c.isalnum()) or c in "._-" for c in name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Which absolute positions of a sequence are owed.

    A sequence of `prompt_len` prompt tokens and `g` generated ones has rows 0 .. prompt_len + g - 2 (with g = 0: all of the
    prompt), since the last sampled token never was an input.

    Attributes:
        positions: None (all), "last", "output" or (first, end).
        include_output: rows of generated tokens are owed too.
    """

    positions: Positions | None = None
    include_output: bool = False

    def admit(self, prompt_len: int, max_tokens: int) -> None:
        """Refuse what can't be delivered, before anything runs.

        Raises:
            OptionError: positions reach past the last row that can exist.
        """
        if isinstance(self.positions, tuple):
            end = self._end(prompt_len, prompt_len + max_tokens)
            if self.positions[1] > end:
                what = "prompt and output" if self.include_output else "the prompt (include_output_tokens is false)"
                raise OptionError(
                    f"kv_transfer_params.positions: {list(self.positions)} is outside: {what} has rows 0 to {end - 1}"
                )

    def owed(self, prompt_len: int, total_len: int) -> range:
        """The positions owed by a finished sequence of `total_len` tokens.

        Raises:
            OptionError: an explicit span reaches past what was generated.
        """
        end = self._end(prompt_len, total_len)
        if self.positions is None:
            return range(end)
        if self.positions == "last":
            return range(end - 1, end)
        if self.positions == "output":
            return range(prompt_len, end)
        if self.positions[1] > end:
            raise OptionError(
                f"kv_transfer_params.positions: {list(self.positions)} is outside: the sequence ended with rows 0 to {end - 1}"
            )
        return range(*self.positions)

    def candidates(self, prompt_len: int, max_tokens: int) -> range:
        """The positions that may turn out to be owed, known before the sequence ends."""
        end = self._end(prompt_len, prompt_len + max_tokens)
        if self.positions is None:
            return range(end)
        if self.positions == "last":
            return range(prompt_len - 1, end)
        if self.positions == "output":
            return range(prompt_len, max(end, prompt_len))
        return range(*self.positions)

    def _end(self, prompt_len: int, total_len: int) -> int:
        return max(prompt_len, total_len - 1) if self.include_output else prompt_len


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSpec:
    """What one sequence owes: the resolved order that engine and assembly share.

    Attributes:
        layers: layer ids in the caller's order; slot i of a row holds layers[i].
        dtype: dtype of the saved rows, a key of SAVE_DTYPES.
        hidden_size: values per row and layer.
        prompt_len: tokens of the prompt.
        max_tokens: upper bound of generated tokens; 0 when only the prompt is run.
        window: which positions.
    """

    layers: tuple[int, ...]
    dtype: str
    hidden_size: int
    prompt_len: int
    max_tokens: int = 0
    window: Window = Window()

    def __post_init__(self) -> None:
        slot_bytes(self.dtype, self.hidden_size)  # raises what can't be saved

    @property
    def slot_bytes(self) -> int:
        """Bytes of one row in one layer."""
        return slot_bytes(self.dtype, self.hidden_size)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all layers asked for."""
        return len(self.layers) * self.slot_bytes

    @property
    def candidates(self) -> range:
        """Absolute positions that may be owed."""
        return self.window.candidates(self.prompt_len, self.max_tokens)
