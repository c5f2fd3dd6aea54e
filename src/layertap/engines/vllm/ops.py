"""The tap as a custom op: traced into compiled graphs and captured in CUDA graphs.

`layertap::tap(hidden, residual, destinations, plans, table, control, tap)` writes row t of `hidden` (+ `residual`) into cell
`destinations[t] + table[plans[t], tap]` of the arena whose address is in `control[0]`, and `control[1]`, which names the step, into
the cell's stamp, of the array of int32 whose address is in `control[2]`. It declares `control` as mutated: an op that mutates
nothing and returns nothing is dropped by the compiler.
"""

from typing import Any

import torch

_SCHEMA = "tap(Tensor hidden, Tensor? residual, Tensor destinations, Tensor plans, Tensor table, Tensor(a!) control, int tap) -> ()"
VERSION = 2
"""Of what compiled graphs bake in: they are made anew where it differs."""
CONTROL_SIZE = 3
_library: Any = None
_cpu_arenas: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def define() -> None:
    """Define the op in this process. Idempotent."""
    global _library
    if _library is not None:
        return
    library: Any = torch.library.Library("layertap", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(_SCHEMA)
    library.impl("tap", _tap_cpu, "CPU")
    library.impl("tap", _tap_cuda, "CUDA")
    torch.library.register_fake("layertap::tap", _tap_fake, lib=library)
    _library = library


def register_cpu_arena(arena: torch.Tensor, stamps: torch.Tensor) -> int:
    """Make a CPU arena [cells, width] and its stamps known by the arena's address, which goes into the control tensor."""
    _cpu_arenas[arena.data_ptr()] = arena, stamps
    return arena.data_ptr()


def forget_cpu_arena(address: int) -> None:
    """Drop a CPU arena."""
    _cpu_arenas.pop(address, None)


def _tap_cpu(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    destinations: torch.Tensor,
    plans: torch.Tensor,
    table: torch.Tensor,
    control: torch.Tensor,
    tap: int,
) -> None:
    registered = _cpu_arenas.get(int(control[0]))
    if registered is None:  # dummy and profiling runs, before anything is captured
        return
    hidden = hidden.reshape(-1, hidden.shape[-1])
    num_rows = min(hidden.shape[0], destinations.shape[0])
    rows = (destinations[:num_rows] >= 0).nonzero().squeeze(1)
    ranks = table[plans[rows].long(), tap]  # the plan of a row that isn't captured means nothing
    rows, ranks = rows[ranks >= 0], ranks[ranks >= 0]
    if not len(rows):
        return
    value = hidden[rows]
    if residual is not None:
        value = value + residual.reshape(-1, residual.shape[-1])[rows]
    arena, stamps = registered
    cells = (destinations[rows] + ranks).long()
    arena[cells] = value.to(arena.dtype)
    stamps[cells] = int(control[1])


def _tap_cuda(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    destinations: torch.Tensor,
    plans: torch.Tensor,
    table: torch.Tensor,
    control: torch.Tensor,
    tap: int,
) -> None:
    from layertap.engines.vllm.kernels import tap_rows

    hidden = hidden.reshape(-1, hidden.shape[-1])
    if residual is not None:
        residual = residual.reshape(-1, residual.shape[-1])
    tap_rows(hidden, residual, destinations, plans, table, control, tap)


def _tap_fake(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    destinations: torch.Tensor,
    plans: torch.Tensor,
    table: torch.Tensor,
    control: torch.Tensor,
    tap: int,
) -> None:
    return None
