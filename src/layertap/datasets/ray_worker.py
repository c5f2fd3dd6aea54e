"""One actor of `layertap extract --ray`: a model, and a writer that offers its parts instead of publishing them.

Only the driver gives a part its name. So an actor that was given up, but still lives behind a broken network, can't add to
the set what another one has computed meanwhile.
"""

import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from layertap.datasets.extraction import RunOptions, RunReport, make_manifest
from layertap.datasets.index import SampleEntry
from layertap.datasets.inputs import InputFile, Record
from layertap.datasets.manifest import Manifest
from layertap.datasets.running import run_records
from layertap.datasets.sharing import refuse_unless_causal
from layertap.datasets.writer import Compression, DatasetWriter
from layertap.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Counts that add up. They are those of `RunReport`."""

    num_samples: int = 0
    num_tokens: int = 0
    num_failed: int = 0
    num_shared: int = 0
    num_shared_tokens: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A part that lies ready; its samples count as done once the driver has renamed it."""

    temporary: Path
    path: Path
    done: tuple[int, ...]
    """Places in the input of its samples."""
    failed: tuple[tuple[int, str], ...]
    """The inputs that failed, with the reason."""
    tally: Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What an actor has done since it started, and the parts that it hasn't offered before."""

    offers: list[Offer]
    tally: Tally = field(default_factory=Tally)
    num_unshown: int = 0
    """As in `RunReport`."""
    compression: Compression = field(default_factory=Compression)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """An actor is ready."""

    manifest: Manifest
    node: str
    pid: int
    engine: str


class ExtractionWorker:
    """What an actor does. Calls of `status` and `stop` come while another thread is inside of `run`.

    Args:
        model: folder, hub id or GGUF file.
        engine_options: of `LLM`.
        source: the input, for the manifest; it isn't opened.
        options: of the run.
        name: begins the names of the files that it writes.
    """

    def __init__(
        self, model: str, engine_options: dict[str, Any], source: InputFile, options: RunOptions, name: str
    ) -> None:
        self._model = model
        self._engine_options = engine_options
        self._source = source
        self._options = options
        self._name = name
        self._lock = threading.Lock()
        self._offers: list[Offer] = []
        self._writer: DatasetWriter | None = None
        self._stopped = False
        self._report = RunReport(folder=Path())

    def start(self) -> Hello:
        """Load the model.

        Raises:
            LayertapError: it can't be loaded, or an option can't be honoured.
        """
        self._llm = LLM(self._model, layers=self._options.layers, **self._engine_options)
        info = self._llm.info
        manifest = make_manifest(self._llm, self._source, self._options)
        if self._options.share_prefixes:
            refuse_unless_causal(self._llm, manifest.rows.layers)
        return Hello(
            manifest=manifest,
            node=socket.gethostname(),
            pid=os.getpid(),
            engine=f"{info.num_layers} blocks of {info.hidden_size}, {info.dtype} on {info.device}; "
            f"{info.engine} {info.engine_version}",
        )

    def run(self, folder: Path, manifest: Manifest, records: Sequence[Record]) -> Status:
        """Run records; returns when all of them are written, if not yet offered.

        Raises:
            StoreFullError: the disk is full.
            OSError: another reason of the disk's.
        """
        if self._writer is None:
            self._report.folder = folder
            self._writer = DatasetWriter(folder, manifest, self._options.shards, name=self._name, offer=self._offer)
        run_records(
            self._llm, records, self._options, manifest, self._writer, self._report, should_stop=lambda: self._stopped
        )
        return self.status()

    def flush(self) -> Status:
        """Offer everything that is written.

        Raises:
            StoreFullError: the disk is full.
            OSError: another reason of the disk's.
        """
        if self._writer is not None:
            self._writer.flush()
        return self.status()

    def status(self) -> Status:
        """Say what is done, and hand the new parts over; each is handed over once."""
        with self._lock:
            offers, self._offers = self._offers, []
        report = self._report
        return Status(
            offers=offers,
            tally=Tally(**{one.name: getattr(report, one.name) for one in fields(Tally)}),
            num_unshown=report.num_unshown,
            compression=Compression() if self._writer is None else self._writer.compression,
        )

    def stop(self) -> None:
        """Let `run` end when the prompts that are running are through."""
        self._stopped = True

    def _offer(self, temporary: Path, path: Path, entries: list[SampleEntry]) -> None:
        shared = [entry.tokens - entry.own_tokens for entry in entries if entry.before is not None]
        done = tuple(entry.index for entry in entries if entry.error is None)
        failed = tuple((entry.index, entry.error) for entry in entries if entry.error is not None)
        tally = Tally(
            num_samples=len(done),
            num_tokens=sum(entry.tokens for entry in entries),
            num_failed=len(failed),
            num_shared=len(shared),
            num_shared_tokens=sum(shared),
        )
        offer = Offer(temporary=temporary, path=path, done=done, failed=failed, tally=tally)
        with self._lock:
            self._offers.append(offer)
