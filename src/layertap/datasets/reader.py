"""Read a data set: a sequence of samples in the order of the input, by memory map, without copies.

    ds = layertap.open_dataset("states")
    len(ds), ds[0]["hidden_states"].shape, ds[-1]["token_ids"], [sample["index"] for sample in ds[10:20]]

Opening reads the manifest and five columns of the index; a shard is mapped when the first of its samples is asked for.
A set that is still being written can be opened; it shows the shards that are published.
"""

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, overload

import numpy as np
from numpy.typing import NDArray

from layertap.capture.spans import Spans
from layertap.datasets.index import SampleEntry, load_entries, read_part, spans_of
from layertap.datasets.joining import find_shares, joined_lookup, joined_manifest
from layertap.datasets.lookup import Lookup, load_lookup
from layertap.datasets.manifest import Manifest, read_manifest
from layertap.datasets.shards import MappedShard
from layertap.datasets.writer import file_info
from layertap.errors import CorruptError, ForeignError, HiddenStatesError
from layertap.files.paths import whole_path
from layertap.files.values import check_read_dtype, to_tensors
from layertap.memory import memory_bytes

if TYPE_CHECKING:
    import torch

_MOST_MAPPED = 4096  # far below the kernel's usual limit of 65,530 mappings


class DatasetItem(TypedDict):
    """One sample."""

    index: int
    """Its place in the input, from 0."""
    hidden_states: "torch.Tensor"
    """[tokens, layers, hidden] in the saved dtype, a view of the mapped file; with `dtype`, a copy in that."""
    hidden_states_scale: NotRequired["torch.Tensor"]
    """[tokens, layers] float32, only with fp8 rows as they are saved: a value stands for itself times its scale."""
    token_ids: "torch.Tensor"
    """[tokens] int64."""
    prompt_len: int
    loss_mask: "torch.Tensor | None"
    """[tokens] bool: the tokens that the model itself would have generated; None where the sample has no mask."""
    positions: "torch.Tensor"
    """[tokens] int64: where in the sequence the rows stand; 0, 1, ... unless only some were kept."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An input that has no sample, and why."""

    index: int
    sample_id: str | None
    reason: str


def open_dataset(path: str | Path, *, verify: bool = False, dtype: str | None = None) -> "Dataset":
    """Open a data set that `layertap extract` wrote.

    Args:
        path: its folder; also the folder that holds the shares of several machines (`--shard`), which are read as one.
        verify: compare each sample with its checksum when it is read.
        dtype: "float32", "bfloat16" or "float16": rows are converted when they are read; None: they come as they are saved.

    Raises:
        MissingError: there is no data set, or the share of a machine is missing.
        HiddenStatesError: manifest or index are damaged or of something else.
        OptionError: a dtype that rows can't be read as.
    """
    check_read_dtype(dtype)
    folder = whole_path(path)
    shares = find_shares(folder)
    if shares:
        return Dataset(folder, joined_manifest(shares), joined_lookup(folder, shares), verify=verify, read_dtype=dtype)
    manifest = read_manifest(folder)
    return Dataset(folder, manifest, load_lookup(folder, manifest.id, use_cache=True), verify=verify, read_dtype=dtype)


class Dataset(Sequence[DatasetItem]):
    """The samples of a data set. Slices are data sets, too; it can be pickled and sent to worker processes."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        lookup: Lookup,
        *,
        verify: bool,
        read_dtype: str | None = None,
        selection: NDArray[np.int64] | None = None,
        large: bool | None = None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self._lookup = lookup
        self._verify = verify
        self._read_dtype = read_dtype
        self._selection = np.arange(len(lookup)) if selection is None else selection
        self._file_info = file_info(manifest)
        self._large = large
        self._rows_in_file: NDArray[np.int64] | None = None
        self._mapped: dict[int, MappedShard] = {}
        self._entries: dict[int, list[SampleEntry]] = {}
        self._checksums: dict[int, NDArray[np.bytes_]] = {}

    @property
    def layers(self) -> tuple[int, ...]:
        """Layer ids, in the order of the second axis of `hidden_states`."""
        return self.manifest.rows.layers

    @property
    def dtype(self) -> str:
        """Dtype of the saved rows."""
        return self.manifest.rows.save_dtype

    @property
    def hidden_size(self) -> int:
        """Values per token and layer."""
        return self.manifest.rows.hidden_size

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self._lookup.tokens[self._selection].sum(dtype=np.int64))

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sample."""
        return self._lookup.tokens[self._selection]

    @property
    def indices(self) -> NDArray[np.int64]:
        """Place in the input of each sample; where inputs failed, it has gaps."""
        return self._lookup.index[self._selection]

    @property
    def files(self) -> list[str]:
        """The files of its rows, relative to the folder."""
        return [self._lookup.files[number] for number in np.unique(self._lookup.file[self._selection])]

    @property
    def file_numbers(self) -> NDArray[np.int32]:
        """For each sample a number of the file that holds it; samples of one file have the same."""
        return self._lookup.file[self._selection]

    @property
    def failures(self) -> list[Failure]:
        """The inputs that have no sample, with the reason that was last on record."""
        failed: dict[int, Failure] = {}
        for part, dataset_id in zip(self._lookup.parts, self._lookup.ids, strict=True):
            columns = read_part(part, dataset_id, ("index", "sample_id", "error"))
            for row in columns.filter(columns.column("error").is_valid()).to_pylist():
                failed[row["index"]] = Failure(row["index"], row["sample_id"], row["error"])
        done = set(self._lookup.index.tolist())
        return [failed[index] for index in sorted(failed) if index not in done]

    def entry(self, position: int) -> SampleEntry:
        """Return the line of the index of sample `position`: file, row, checksum, own id, ..."""
        return self._entry(self._at(position))

    def read_as(self, dtype: str | None) -> "Dataset":
        """The same samples, with rows that are converted when they are read; None: as they are saved.

        Raises:
            OptionError: a dtype that rows can't be read as.
        """
        check_read_dtype(dtype)
        return self._with(read_dtype=dtype)

    def verify(self) -> None:
        """Compare every sample with its checksum.

        Raises:
            HiddenStatesError: the first that doesn't match, or can't be read.
        """
        for at in self._selection.tolist():
            self._read(at, verify=True)

    def __len__(self) -> int:
        return len(self._selection)

    @overload
    def __getitem__(self, position: int) -> DatasetItem: ...
    @overload
    def __getitem__(self, position: slice) -> "Dataset": ...
    def __getitem__(self, position: int | slice) -> "DatasetItem | Dataset":
        if isinstance(position, slice):
            return self._with(selection=self._selection[position])
        import torch

        at = self._at(position)
        raw, token_ids = self._read(at, self._verify)
        slots = raw.reshape(len(token_ids), len(self.layers), -1)
        values = to_tensors(slots, self.dtype, self._read_dtype)
        item = DatasetItem(
            index=self._lookup.index.item(at),
            hidden_states=values["hidden_states"],
            token_ids=torch.from_numpy(token_ids),
            prompt_len=self._lookup.prompt_tokens.item(at),
            loss_mask=None if (mask := self._loss_mask(at)) is None else torch.from_numpy(mask),
            positions=torch.from_numpy(self._positions(at)),
        )
        if "hidden_states_scale" in values:
            item["hidden_states_scale"] = values["hidden_states_scale"]
        return item

    def raw(self, position: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the bytes [tokens, bytes of a row] and the token ids of a sample, without torch."""
        return self._read(self._at(position), self._verify)

    def will_need(self, positions: Iterable[int]) -> None:
        """Say which samples are going to be read: a disk fetches those of a large set beside one another.

        Does nothing for sets that memory can hold: what the kernel reads around a sample is of use there, too.

        Args:
            positions: in this set. Damage shows when they are read.
        """
        if self._is_large:
            for at in map(self._at, positions):
                with contextlib.suppress(HiddenStatesError, OSError):
                    self._shard(self._lookup.file.item(at)).will_need(self._spans(at))

    @property
    def _is_large(self) -> bool:
        """What the kernel reads around a sample would be gone again before its turn."""
        if self._large is None:
            rows = int(self._lookup.tokens.sum(dtype=np.int64)) - int(self._lookup.before.lengths().sum())
            self._large = rows * self._file_info.row_bytes > memory_bytes() // 2
        return self._large

    def _read(self, at: int, verify: bool) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        shard = self._shard(self._lookup.file.item(at))
        if self._is_large:
            shard.will_need(self._spans(at))
        return shard.read(self._spans(at), self._checksum(at) if verify else None)

    def _checksum(self, at: int) -> str:
        """From a column of its own: whole lines of the index of a million samples would take a gigabyte."""
        number = self._lookup.part.item(at)
        known = self._checksums.get(number)
        if known is None:
            column = read_part(self._lookup.parts[number], self._lookup.ids[number], ("checksum",)).column(0)
            known = self._checksums[number] = np.array(column.fill_null("").to_pylist(), "S32")
        found: bytes = known[self._lookup.line.item(at)]
        return found.decode()

    def _spans(self, at: int) -> Spans:
        row, tokens = self._lookup.row.item(at), self._lookup.tokens.item(at)
        before = self._lookup.before.get(at)
        return ((row, row + tokens),) if before is None else spans_of(row, tokens, tuple(map(tuple, before.tolist())))

    def loss_mask(self, position: int) -> NDArray[np.bool_] | None:
        """Return which tokens of a sample are trained, or None where it has no mask."""
        return self._loss_mask(self._at(position))

    def positions(self, position: int) -> NDArray[np.int64]:
        """Return where in the sequence the rows of a sample stand."""
        return self._positions(self._at(position))

    @property
    def num_trained_tokens(self) -> int:
        """Trained tokens of all samples that have a mask."""
        return int(self._lookup.loss_mask.lengths()[self._selection].sum())

    def __iter__(self) -> Iterator[DatasetItem]:
        return (self[position] for position in range(len(self)))

    def __repr__(self) -> str:
        rows = self.manifest.rows
        return (
            f"<Dataset {self.folder.name!r}: {len(self)} samples, {self.num_tokens} tokens, layers {list(rows.layers)} "
            f"of {rows.model}, {rows.save_dtype}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        # mappings can't be pickled, and what was read is read again; the other process makes its own
        return {**self.__dict__, "_mapped": {}, "_entries": {}, "_checksums": {}}

    def _with(self, **changes: Any) -> "Dataset":
        options: dict[str, Any] = {"verify": self._verify, "read_dtype": self._read_dtype, "large": self._large}
        options |= {"selection": self._selection, **changes}
        return Dataset(self.folder, self.manifest, self._lookup, **options)

    def _at(self, position: int) -> int:
        """Turn a position in this set, maybe negative, into a line of the lookup."""
        try:
            return self._selection.item(operator.index(position))
        except IndexError:
            raise IndexError(f"sample {position} of a data set of {len(self)}") from None

    def _loss_mask(self, at: int) -> NDArray[np.bool_] | None:
        spans = self._lookup.loss_mask.get(at)
        if spans is None:
            return None
        tokens = self._lookup.tokens.item(at)
        mask = np.zeros(tokens, np.bool_)
        for start, end in spans.tolist():
            if not 0 <= start < end <= tokens:
                raise CorruptError(f"{self.folder}: sample {self._lookup.index[at]}: loss mask [{start}, {end}]")
            mask[start:end] = True
        return mask

    def _positions(self, at: int) -> NDArray[np.int64]:
        spans = self._lookup.positions.get(at)
        tokens = self._lookup.tokens.item(at)
        if spans is None:
            return np.arange(tokens)
        found: NDArray[np.int64] = np.concatenate(
            [np.empty(0, np.int64), *(np.arange(start, end) for start, end in spans.tolist())]
        )
        if len(found) != tokens:
            raise CorruptError(
                f"{self.folder}: sample {self._lookup.index[at]}: {len(found)} positions of {tokens} rows in the index"
            )
        return found

    def _entry(self, at: int) -> SampleEntry:
        return self._part(self._lookup.part.item(at))[self._lookup.line.item(at)]

    def _part(self, number: int) -> list[SampleEntry]:
        if number not in self._entries:
            self._entries[number] = load_entries(self._lookup.parts[number], self._lookup.ids[number])
        return self._entries[number]

    def _shard(self, number: int) -> MappedShard:
        shard = self._mapped.get(number)
        if shard is None:
            name = self._lookup.files[number]
            path = self.folder / name
            if ".." in Path(name).parts or Path(name).is_absolute():
                raise ForeignError(f"{self.folder}: the index names a file outside of the data set: {name}")
            if len(self._mapped) >= _MOST_MAPPED:
                with contextlib.suppress(StopIteration, KeyError):  # another thread may have been faster
                    self._mapped.pop(next(iter(self._mapped)))
            shard = self._mapped[number] = MappedShard(path, self._file_info, self._expected_rows(number))
        return shard

    def _expected_rows(self, file: int) -> int:
        if self._rows_in_file is None:
            expected = np.zeros(len(self._lookup.files), np.int64)
            own = self._lookup.tokens - self._lookup.before.lengths()
            np.maximum.at(expected, self._lookup.file, self._lookup.row + own)
            self._rows_in_file = expected
        return int(self._rows_in_file[file])
