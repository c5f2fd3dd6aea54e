"""The tap on plain modules: every captured row is there, and what leaves the device is what was asked for."""

import numpy as np
import pytest
import torch
from torch import nn

from layertap.engines.vllm.compat import Layout
from layertap.engines.vllm.rowmap import SKIP, Want
from layertap.engines.vllm.tap import Tap

NUM_LAYERS, HIDDEN = 36, 16


class Block(nn.Module):
    def forward(self, hidden):
        return hidden + 1


@pytest.fixture
def stack():
    blocks = [Block() for _ in range(NUM_LAYERS)]
    tap = Tap(
        tuple(range(1, NUM_LAYERS + 1)),
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_rows=64,
        max_plans=4,
        host_bytes=1 << 24,
    )
    tap.install(dict(enumerate(blocks)), "output", {})
    yield tap, blocks
    tap.close()


def want(*layers):
    ranks = [SKIP] * NUM_LAYERS
    for rank, layer in enumerate(layers):
        ranks[layer - 1] = rank
    return Want(candidates=range(1000), ranks=tuple(ranks), num_layers=len(layers))


def run(tap, blocks, wants, lengths):
    """One step of requests `a`, `b`, ..., of these lengths; the step and what went into the first block."""
    names = [chr(ord("a") + i) for i in range(len(lengths))]
    num_rows = sum(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    tap.begin(Layout(names, starts, np.zeros(len(lengths), np.int64), num_rows, positions * 7, positions), wants)
    hidden = entering = torch.randn(num_rows, HIDDEN)
    for block in blocks:
        hidden = block(hidden)
    return tap.end(0), entering


def copied_by(stack, wants, lengths=(10, 7)):
    tap, blocks = stack
    before = tap.counts.bytes_copied
    step, entering = run(tap, blocks, wants, lengths)
    if step is not None:
        step.wait()
        assert not step.unwritten().any()
        for chunk in step.chunks:
            layers = [layer for layer, rank in enumerate(wants[chunk.request_id].ranks, 1) if rank != SKIP]
            rows = chunk.stop - chunk.first
            cells = step.cells[chunk.cell : chunk.cell + rows * len(layers)].view(np.float32)
            found = torch.from_numpy(cells.copy()).view(rows, len(layers), HIDDEN)
            for rank, layer in enumerate(layers):
                wanted = entering[chunk.first : chunk.stop].clone()
                for _ in range(layer):
                    wanted = wanted + 1
                assert torch.equal(found[:, rank], wanted)
        assert step.cells.nbytes == tap.counts.bytes_copied - before
        step.release()
    return tap.counts.bytes_copied - before


def test_one_of_36_layers_costs_a_36th_of_the_bytes_of_all(stack):
    row_bytes = HIDDEN * 4
    one = copied_by(stack, {"a": want(18), "b": want(18)})
    every = copied_by(stack, {"a": want(*range(1, 37)), "b": want(*range(1, 37))})
    assert (one, every) == (17 * row_bytes, 17 * 36 * row_bytes)


def test_cells_that_a_step_did_not_write_are_known_though_rows_of_earlier_steps_are_in_them(stack):
    tap, blocks = stack
    wants = {"a": want(2, 5, 36)}
    for _ in range(2):
        step, _ = run(tap, blocks, wants, [10])
        assert not step.unwritten().any()
        before = step.cells.copy()
        step.release()
    block, tapped = blocks[4], blocks[4].forward
    del block.forward  # a compiled graph without the tap
    step, _ = run(tap, blocks, wants, [10])
    block.forward = tapped
    stale = step.unwritten().reshape(10, 3)
    assert stale[:, 1].all()
    assert not stale[:, [0, 2]].any()
    assert np.array_equal(step.cells.reshape(10, 3, -1)[:, 1], before.reshape(10, 3, -1)[:, 1])
    step.release()


def test_rows_that_nobody_asked_for_stay_on_the_device(stack):
    row_bytes = HIDDEN * 4
    assert copied_by(stack, {}) == 0
    assert copied_by(stack, {"b": want(2, 36)}) == 7 * 2 * row_bytes
    few = Want(candidates=range(3, 5), ranks=want(9).ranks, num_layers=1)
    assert copied_by(stack, {"a": few}) == 2 * row_bytes
