"""What the scheduler's process tells the workers: which requests to capture, and how they ended. Pickled with every step."""

from dataclasses import dataclass, field

from layertap.capture.request import CaptureSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Capture this request.

    Attributes:
        request_id: vLLM's internal id, by which the batch names it.
        spec: what is owed.
        path: where the file goes, absolute.
        overwrite: replace an existing file.
        public_id: the id that the client knows.
        tag: the client's own id, or None.
        prefill: only the prompt is wanted.
        lora: name of the adapter that the request runs with, or None.
    """

    request_id: str
    spec: CaptureSpec
    path: str
    overwrite: bool
    public_id: str
    tag: str | None
    prefill: bool = False
    lora: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The request ended.

    Attributes:
        token_ids: prompt and output.
        finish_reason: as the client is told it ("stop", "length", ...).
        failure: why there will be no file, or None.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Keep the rows of a block as the request computes them.

    Attributes:
        start: position of the block's first row.
        slots: (layer, slot) for each layer that is to be kept.
    """

    request_id: str
    start: int
    slots: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """The request read these positions from vLLM's prefix cache: deliver their rows from the slots.

    Attributes:
        start, stop: positions.
        slots: for each block from start's on: the slots of the request's layers, in their order.
    """

    request_id: str
    start: int
    stop: int
    slots: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixNews:
    """What a step does with the rows of cached blocks: `fills` before its rows are taken, `reuses` behind them.

    Attributes:
        block_size: rows of a slot.
        num_slots: slots at most.
        cell_bytes: one row of one layer.
    """

    block_size: int
    num_slots: int
    cell_bytes: int
    fills: tuple[Fill, ...]
    reuses: tuple[Reuse, ...]


@dataclass(slots=True)
class News:
    """Orders and endings since the last step, in the order in which they came up."""

    step: int
    items: list[Order | Finish] = field(default_factory=list)
    prefix: PrefixNews | None = None
