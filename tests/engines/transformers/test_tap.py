"""The tap and its arenas: the right rows in the right place, and buffers that are reused only when nobody reads them."""

import threading
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from layertap.capture.residual import Residual
from layertap.engines.transformers import tap
from layertap.engines.transformers.tap import Arenas, EarlyExit, Piece, Tap, run_to_exit
from layertap.errors import UnsupportedModelError

CPU = torch.device("cpu")
SINGLE = Residual(kind="single", note="", parameter="x", hidden_size=2)


class AddOne(nn.Module):
    """A block whose output tells its depth."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return (x + 1,)


def stack(num_blocks):
    blocks = nn.ModuleList([AddOne() for _ in range(num_blocks)])

    def forward(x, order=None):
        for i in order if order is not None else range(num_blocks):
            x = blocks[i](x)[0]
        return x

    return blocks, Tap(blocks, SINGLE), forward


def test_rows_of_each_layer_land_in_its_slot_and_deeper_blocks_do_not_run():
    blocks, tap, forward = stack(4)
    x = torch.arange(6.0).reshape(1, 3, 2)
    rows = torch.full((3, 3, 2), float("nan"))
    with tap.into(rows, [2, 0, 1], [Piece(0, 0, 3, 0)], (1, 3)):
        run_to_exit(lambda: forward(x))
    assert torch.equal(rows, torch.stack([x[0] + 2, x[0], x[0] + 1], dim=1))
    assert [block.calls for block in blocks] == [1, 1, 0, 0]


def test_the_last_id_is_what_the_last_block_puts_out():
    _, tap, forward = stack(2)
    x = torch.zeros(1, 2, 2)
    rows = torch.empty(2, 1, 2)
    with tap.into(rows, [2], [Piece(0, 0, 2, 0)], (1, 2)):
        run_to_exit(lambda: forward(x))
    assert (rows == 2).all()


def test_pieces_pick_rows_of_a_padded_batch():
    _, tap, forward = stack(1)
    x = torch.arange(16.0).reshape(2, 4, 2)
    rows = torch.empty(5, 1, 2)
    with tap.into(rows, [0], [Piece(0, 1, 4, 0), Piece(1, 0, 2, 3)], (2, 4)):
        run_to_exit(lambda: forward(x))
    assert torch.equal(rows[:, 0], torch.cat([x[0, 1:4], x[1, :2]]))


def test_many_pieces_are_gathered_into_the_same_places():
    _, tap, forward = stack(1)
    x = torch.arange(80.0).reshape(2, 20, 2)
    wanted = [(batch, 2 * i, 2 * i + 1) for batch in range(2) for i in range(10)]
    rows = torch.full((20, 1, 2), float("nan"))
    with tap.into(rows, [1], [Piece(b, begin, end, row) for row, (b, begin, end) in enumerate(wanted)], (2, 20)):
        run_to_exit(lambda: forward(x))
    assert torch.equal(rows[:, 0], torch.stack([x[b, begin] + 1 for b, begin, _ in wanted]))


def test_a_skipped_block_is_entered_by_what_enters_the_next():
    _, tap, forward = stack(4)
    rows = torch.full((1, 4, 2), float("nan"))
    with tap.into(rows, [0, 1, 2, 3], [Piece(0, 0, 1, 0)], (1, 1)):
        run_to_exit(lambda: forward(torch.zeros(1, 1, 2), order=[0, 2, 3]))
    assert rows[0, :, 0].tolist() == [0, 1, 1, 2]


def test_a_block_that_runs_twice_is_refused():
    _, tap, forward = stack(3)
    with (
        tap.into(torch.empty(1, 1, 2), [2], [Piece(0, 0, 1, 0)], (1, 1)),
        pytest.raises(UnsupportedModelError, match="twice"),
    ):
        run_to_exit(lambda: forward(torch.zeros(1, 1, 2), order=[0, 0, 1]))


def test_a_stream_with_other_rows_than_tokens_is_refused():
    _, tap, forward = stack(1)
    with (
        tap.into(torch.empty(2, 1, 2), [0], [Piece(0, 0, 2, 0)], (1, 2)),
        pytest.raises(UnsupportedModelError, match="one to one"),
    ):
        run_to_exit(lambda: forward(torch.zeros(1, 5, 2)))


def test_a_forward_that_never_reaches_the_layer_is_an_error():
    _, tap, forward = stack(3)
    with (
        tap.into(torch.empty(1, 1, 2), [3], [Piece(0, 0, 1, 0)], (1, 1)),
        pytest.raises(RuntimeError, match="never|ended before"),
    ):
        run_to_exit(lambda: forward(torch.zeros(1, 1, 2), order=[0]))


def test_the_tap_sleeps_outside_of_its_context():
    _, tap, forward = stack(2)
    with tap.into(torch.empty(1, 1, 2), [0], [Piece(0, 0, 1, 0)], (1, 1)), pytest.raises(EarlyExit):
        forward(torch.zeros(1, 1, 2))
    assert (forward(torch.zeros(1, 1, 2)) == 2).all()


def test_an_arena_is_free_again_only_when_every_share_is_back():
    arenas = Arenas(CPU, count=1)
    arena = arenas.acquire(4, 2, 3, torch.float32)
    arena.rows.copy_(torch.arange(24.0).reshape(4, 2, 3))
    first, release_first = arena.share(0, 1)
    second, release_second = arena.share(1, 4)
    arena.give_back()
    taken = threading.Event()

    def take():
        arenas.acquire(4, 2, 3, torch.float32).rows.zero_()
        taken.set()

    thread = threading.Thread(target=take)
    thread.start()
    release_first()
    release_first()  # a second call changes nothing
    assert not taken.is_set()
    assert second.shape == (3, 2, 12)
    assert second.view("float32").ravel().tolist() == list(range(6, 24))
    release_second()
    thread.join(timeout=30)
    assert taken.is_set()
    assert first.nbytes == 24


def test_arenas_reuse_memory_and_grow_when_they_must():
    arenas = Arenas(CPU, count=1)
    small = arenas.acquire(2, 1, 4, torch.float32)
    small.give_back()
    again = arenas.acquire(1, 1, 4, torch.bfloat16)
    assert again is small
    again.give_back()
    large = arenas.acquire(100, 1, 4, torch.float32)
    assert large is not small
    assert large.rows.shape == (100, 1, 4)
    large.give_back()


def test_an_arena_too_large_for_the_memory_does_not_block_later_ones():
    arenas = Arenas(torch.device("cpu"), count=1)
    arenas.acquire(1, 1, 8, torch.float32).give_back()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            arenas.acquire(1 << 50, 1, 8, torch.float32)
    arenas.acquire(1, 1, 8, torch.float32).give_back()


def test_users_that_each_keep_an_arena_do_not_wait_for_one_another():
    arenas = Arenas(CPU, count=2)
    with ExitStack() as users:
        kept = []
        for _ in range(4):
            users.enter_context(arenas.one_more_user())
            kept.append(arenas.acquire(1, 1, 4, torch.float32))
        arenas.acquire(1, 1, 4, torch.float32).give_back()  # would wait for ever if there were but two
        for arena in kept:
            arena.give_back()
    assert arenas._made == len(arenas._free) == 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("the device's"), RuntimeError("pinned memory")])
def test_where_one_more_arena_does_not_fit_the_others_are_used_in_turn(monkeypatch, error):
    arenas = Arenas(CPU, count=4)
    with arenas.one_more_user():
        first, second = (arenas.acquire(4, 1, 4, torch.float32) for _ in range(2))
        real = tap.Arena
        asked = threading.Event()

        def too_many(*args):
            asked.set()
            raise error

        monkeypatch.setattr(tap, "Arena", too_many)
        taken = []
        thread = threading.Thread(target=lambda: taken.append(arenas.acquire(4, 1, 4, torch.float32)))
        thread.start()
        assert asked.wait(30)
        second.give_back()
        thread.join(30)
        assert taken == [second]
        monkeypatch.setattr(tap, "Arena", real)
        first.give_back()
        assert arenas.acquire(4, 1, 4, torch.float32) is first
        assert arenas._made == arenas._allowed == 2


def test_where_not_even_a_second_arena_fits_its_user_is_told():
    """Waiting would be for ever: the only arena may hold what this very user hasn't delivered yet."""
    arenas = Arenas(CPU, count=4)
    with arenas.one_more_user():
        arenas.acquire(1, 1, 4, torch.float32)
        with pytest.raises(RuntimeError):
            arenas.acquire(1 << 50, 1, 8, torch.float32)
        assert arenas._made == 1


def test_a_slightly_larger_batch_takes_the_same_arena():
    arenas = Arenas(CPU, count=1)
    first = arenas.acquire(1000, 1, 64, torch.float32)
    first.give_back()
    assert arenas.acquire(1008, 1, 64, torch.float32) is first


def test_an_interrupt_while_an_arena_is_made_is_not_taken_for_a_lack_of_memory(monkeypatch):
    arenas = Arenas(CPU, count=4)
    with arenas.one_more_user():
        kept = [arenas.acquire(1, 1, 4, torch.float32) for _ in range(2)]

        def interrupted(*_args):
            raise KeyboardInterrupt

        monkeypatch.setattr(tap, "Arena", interrupted)
        with pytest.raises(KeyboardInterrupt):
            arenas.acquire(1, 1, 4, torch.float32)
        monkeypatch.undo()
        assert arenas._made == len(kept) == 2
        assert arenas.acquire(1, 1, 4, torch.float32) is not None


def test_with_several_users_each_keeps_one_and_one_goes_round(monkeypatch):
    arenas = Arenas(CPU, count=4)
    with arenas.one_more_user(), arenas.one_more_user():
        kept = [arenas.acquire(1, 1, 4, torch.float32) for _ in range(2)]
        spare = arenas.acquire(1, 1, 4, torch.float32)

        def too_many(*_args):
            spare.give_back()  # just now
            raise torch.OutOfMemoryError("no more")

        monkeypatch.setattr(tap, "Arena", too_many)
        assert arenas.acquire(1, 1, 4, torch.float32) is spare
        assert arenas._made == arenas._allowed == len(kept) + 1


def test_arenas_of_long_prompts_are_fewer():
    """Their limit is that of all together, but each user gets what it can't do without."""
    arenas = Arenas(CPU, count=6, limit_bytes=6 * 16 * 64)
    with arenas.one_more_user():
        long = [arenas.acquire(4 * 64, 1, 4, torch.float32) for _ in range(2)]  # 8 of 6
        taken = []
        thread = threading.Thread(target=lambda: taken.append(arenas.acquire(64, 1, 4, torch.float32)))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        long[0].give_back()
        thread.join(30)
        assert taken == [long[0]]
        long[1].give_back()
        taken[0].give_back()
    short = [arenas.acquire(64, 1, 4, torch.float32) for _ in range(2)]
    assert short[0] in long


def test_memory_for_a_forward_comes_from_arenas_that_are_free_or_will_be():
    arenas = Arenas(CPU, count=6)
    with arenas.one_more_user():
        mine, written, free = (arenas.acquire(1, 1, 4, torch.float32) for _ in range(3))
        free.give_back()
        shrunk = []
        thread = threading.Thread(target=lambda: shrunk.append(arenas.shrink()))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        written.give_back()
        thread.join(30)
        assert shrunk == [True]
        assert (arenas._made, arenas._free, arenas._count) == (1, [], 3)
        assert arenas.shrink()
        assert not arenas.shrink()  # two are needed
        mine.give_back()
    assert arenas._made_bytes == sum(arena.nbytes for arena in arenas._free)
