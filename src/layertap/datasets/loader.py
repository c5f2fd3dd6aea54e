"""A data set for PyTorch training: shuffled by shard and inside, over ranks and workers, and resumable.

    from layertap.datasets.loader import HiddenStatesDataset, HiddenStatesStream

`HiddenStatesDataset` is map style: any sampler, any order. `HiddenStatesStream` is iterable and brings its own order: shards
are shuffled, and the samples of a few neighbouring shards among one another, so that a disk reads long runs while batches are
mixed well. Both yield the items of `open_dataset`, tensors over the mapped files, without copies.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, get_worker_info

from layertap.datasets.reader import Dataset, DatasetItem, open_dataset
from layertap.errors import OptionError

_STATE_VERSION = 1
_AHEAD = 16
"""Samples of a large set that a disk is told of before their turn: 16 to 32 of them."""


class HiddenStatesDataset(TorchDataset[DatasetItem]):
    """Map style: `len(ds)` and `ds[i]`, in the order of the input.

    Args:
        source: a folder, or what `open_dataset` gave (also a slice of it).
        verify: compare each sample with its checksum when it is read; for a folder.
    """

    def __init__(self, source: str | Path | Dataset, *, verify: bool = False) -> None:
        self.data = _opened(source, verify)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, position: int) -> DatasetItem:
        return self.data[position]

    def __getitems__(self, positions: list[int]) -> list[DatasetItem]:
        """A batch at once, as `DataLoader` asks for it."""
        self.data.will_need(positions)
        return [self.data[position] for position in positions]


class HiddenStatesStream(IterableDataset[DatasetItem]):
    """Iterable: an epoch is every sample once, over all ranks and workers together.

    The order depends on seed, epoch and the set, not on ranks and workers: these take turns in it. So a rank r of n has
    every n-th sample, and the number of ranks may change between epochs. Ranks get the same number of samples: the last
    few that don't go round are left out (`drop_last`) or the first ones given again to fill up; `num_left_out` and
    `num_repeated` say how many.

    Call `set_epoch` before each epoch but the first: iterating again gives the same order again.

    Args:
        source: a folder, or what `open_dataset` gave (also a slice of it).
        batch_size: as it is given to the `DataLoader` (1 for None): its workers then take turns by whole batches, and
            batches are the same for any number of workers.
        shuffle: off: the order of the input.
        seed: of the order.
        window_shards: how many shards are mixed at a time.
        rank: of this process; default torch.distributed's, or torchrun's (RANK), or 0.
        num_ranks: of the job; default torch.distributed's, or torchrun's (WORLD_SIZE), or 1.
        drop_last: leave samples out where ranks can't share them evenly; otherwise repeat some.
        verify: compare each sample with its checksum when it is read; for a folder.

    Raises:
        OptionError: an option that can't be.
    """

    def __init__(
        self,
        source: str | Path | Dataset,
        *,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        window_shards: int = 8,
        rank: int | None = None,
        num_ranks: int | None = None,
        drop_last: bool = False,
        verify: bool = False,
    ) -> None:
        super().__init__()
        self.data = _opened(source, verify)
        if (rank is None) != (num_ranks is None):
            raise OptionError("rank and num_ranks: give both or none")
        self.rank, self.num_ranks = current_rank() if rank is None or num_ranks is None else (rank, num_ranks)
        if not 0 <= self.rank < self.num_ranks:
            raise OptionError(f"rank: {self.rank} is not one of {self.num_ranks} ranks")
        for name, value in (("window_shards", window_shards), ("batch_size", batch_size)):
            if value < 1:
                raise OptionError(f"{name}: expected at least 1, got {value}")
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.window_shards = window_shards
        self.drop_last = drop_last
        self._place = _shared(torch.zeros(2, dtype=torch.int64))
        """Epoch, and where in it the next iteration starts; shared, because workers may outlive an epoch."""
        self._num_taken: int | None = None
        """Samples of this epoch that the last iteration in this process has yielded, with those before its start."""

    def __len__(self) -> int:
        total, ranks = len(self.data), self.num_ranks
        return total // ranks if self.drop_last else -(-total // ranks)

    @property
    def epoch(self) -> int:
        """Whose order it is."""
        return int(self._place[0])

    @property
    def _first(self) -> int:
        return int(self._place[1])

    def _start_at(self, epoch: int, first: int) -> None:
        self._place[0], self._place[1] = epoch, first

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._place = _shared(self._place)  # of a plain copy, too

    @property
    def num_left_out(self) -> int:
        """Samples that no rank gets in an epoch."""
        return len(self.data) % self.num_ranks if self.drop_last else 0

    @property
    def num_repeated(self) -> int:
        """Samples that two ranks get in an epoch."""
        return 0 if self.drop_last else len(self) * self.num_ranks - len(self.data)

    def set_epoch(self, epoch: int) -> None:
        """Start another epoch at its beginning, with another order."""
        self._start_at(epoch, 0)
        self._num_taken = None

    def state_dict(self, num_taken: int | None = None) -> dict[str, Any]:
        """Say where in the epoch this rank is.

        Args:
            num_taken: samples of this epoch that training has used, on this rank. A `DataLoader` with workers reads
                ahead in other processes, so only the training loop knows it; without workers it is counted here.

        Raises:
            OptionError: num_taken is needed and wasn't given.
        """
        if num_taken is None and self._num_taken is None:
            raise OptionError(
                "state_dict: num_taken is needed: the stream was not iterated in this process (the loader's workers do it in "
                "theirs), so only the caller knows how many samples of this epoch were used"
            )
        return {
            "version": _STATE_VERSION,
            "dataset": self.data.manifest.id,
            "samples": str(xxhash.xxh3_64_hexdigest(self.data.indices.astype("<i8").tobytes())),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "window_shards": self.window_shards,
            "num_ranks": self.num_ranks,
            "drop_last": self.drop_last,
            "epoch": self.epoch,
            "num_taken": self._num_taken if num_taken is None else num_taken,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: the next iteration yields the rest of that epoch.

        Raises:
            OptionError: the state belongs to another set or another order.
        """
        mine = self.state_dict(0)
        differing = [
            f"{name} (state {state.get(name)!r}, here {mine[name]!r})"
            for name in mine
            if name not in ("epoch", "num_taken") and state.get(name) != mine[name]
        ]
        if differing:
            raise OptionError(f"load_state_dict: the state is of another order of samples: {', '.join(differing)}")
        epoch, num_taken = int(state["epoch"]), int(state["num_taken"])
        if not 0 <= num_taken <= len(self):
            raise OptionError(f"load_state_dict: num_taken is {num_taken}, and an epoch has {len(self)} samples a rank")
        self._start_at(epoch, num_taken)
        self._num_taken = num_taken

    def order(self) -> NDArray[np.int64]:
        """The positions that this rank yields in this epoch, all of them."""
        order = self._shuffled() if self.shuffle else np.arange(len(self.data))
        if not len(order):
            return order
        shared = len(self) * self.num_ranks
        # resize goes round
        return (order[:shared] if self.drop_last else np.resize(order, shared))[self.rank :: self.num_ranks]

    def __iter__(self) -> Iterator[DatasetItem]:
        worker = get_worker_info()
        order = self.order()[self._first :]
        if worker is not None:
            # the loader takes turns between its workers, batch by batch
            turn = np.arange(len(order)) // self.batch_size % worker.num_workers
            yield from self._items(order[turn == worker.id].tolist())
            return
        self._num_taken = self._first
        self._start_at(self.epoch, 0)
        for item in self._items(order.tolist()):
            self._num_taken += 1
            yield item

    def _items(self, order: list[int]) -> Iterator[DatasetItem]:
        """The samples in this order; the disk is told of some of them beforehand."""
        for first in range(0, len(order), _AHEAD):
            # of those behind, as many as were told of before are still to be read
            self.data.will_need(order[first + (_AHEAD if first else 0) : first + 2 * _AHEAD])
            for position in order[first : first + _AHEAD]:
                yield self.data[position]

    def _shuffled(self) -> NDArray[np.int64]:
        """Shards in random order; the samples of `window_shards` of them at a time in random order."""
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, self.epoch])))
        files = self.data.file_numbers
        shards = np.unique(files)
        ranks_of_shards = np.empty(len(shards), np.int64)
        ranks_of_shards[random.permutation(len(shards))] = np.arange(len(shards))
        window = ranks_of_shards[np.searchsorted(shards, files)] // self.window_shards
        order: NDArray[np.int64] = np.lexsort((random.random(len(files)), window))
        return order


def _opened(source: str | Path | Dataset, verify: bool) -> Dataset:
    if isinstance(source, Dataset):
        return source
    return open_dataset(source, verify=verify)


def current_rank() -> tuple[int, int]:
    """Rank of this process and number of ranks, by torch.distributed, else by what torchrun says, else (0, 1)."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    # a stream that is made before the process group must not give every rank everything
    rank, num_ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(num_ranks)) if rank.isdecimal() and num_ranks.isdecimal() else (0, 1)


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory that worker processes share; as it is, where it already was."""
    shared: torch.Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return shared
