"""The corridor as an engine sees it: `Recorder.admit` reserves, `Capture.add` takes rows, `finish` publishes, `fail` tells why.

Every failure on the way (a full disk, a hole, a row of another token) ends up in one place: the capture's future and, for a
file, its error twin. The engine and the other captures go on.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from layertap import __version__
from layertap.assembly import Assembly, Piece, Rows
from layertap.capture.options import StoreOptions
from layertap.capture.request import CaptureSpec
from layertap.errors import EngineError, HiddenStatesError, LayertapError
from layertap.files import format as fmt
from layertap.files.publish import PendingFile
from layertap.files.reap import TTL_FACT
from layertap.writing.budget import ByteBudget
from layertap.writing.checks import FinalCheck, RowChecks
from layertap.writing.kinds import kind_of
from layertap.writing.pool import Lane, WriterPool
from layertap.writing.room import Reservation, StoreRoom
from layertap.writing.seen import SeenRows
from layertap.writing.shipping import Shipper
from layertap.writing.sinks import FileSink, MemorySink, Result, Sink

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 22
"""Fits into the last cache; smaller ones cost more of the interpreter than nearer caches give."""
MOST_QUARANTINED = 16
"""A fault that hits every request must not fill the disk with what it spoilt."""


@dataclass(slots=True)
class Counts:
    """What the recorder did, for metrics. Bytes are rows' bytes; failures are by kind (writing.kinds).

    `quarantined` are files whose rows failed a check and were kept where no reader takes them.
    """

    admitted: int = 0
    published: int = 0
    quarantined: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    num_bytes: int = 0

    @property
    def failed(self) -> int:
        """Of all kinds."""
        return sum(list(self.failures.values()))


class Capture:
    """One sequence's way through the corridor. Thread-safe.

    Attributes:
        spec: what is owed.
        path: where the file will be, or None in memory.
        result: resolves to a `Result`, or raises the reason, once published or failed.
    """

    def __init__(
        self,
        spec: CaptureSpec,
        sink: Sink,
        recorder: "Recorder",
        request_id: str,
        path: Path | None,
        room: Reservation | None,
    ) -> None:
        self.spec = spec
        self.path = path
        self.request_id = request_id
        self.result: Future[Result] = Future()
        self.result.set_running_or_notify_cancel()  # whoever waits for it may go away; nobody can cancel it
        self._sink = sink
        self._recorder = recorder
        self._room = room
        self._lane: Lane = recorder.pool.lane()
        self._assembly = Assembly(spec)
        self._checks = RowChecks(spec, request_id, recorder.seen)
        self._lock = threading.RLock()  # a task that is run here and now takes it again
        self._failure: BaseException | None = None
        self._ended = False

    def add(self, rows: Rows) -> None:
        """Take a chunk. May wait for the byte budget; never raises for the capture's own failures."""
        taken: list[int] = []
        release = [rows.release]

        def done() -> None:
            if taken:
                self._recorder.budget.release(taken.pop())
            if release and (call := release.pop()) is not None:
                call()

        try:
            if not rows.is_bounded:
                self._recorder.budget.acquire(int(rows.data.nbytes), taken)
            with self._lock:  # deciding and queueing together, so that a later step's bytes are also written later
                self._queue(rows, done)
        except BaseException as exc:
            # Ctrl-C: whether the rows are queued isn't known, so nothing of them may be published
            self._failure = exc
            done()
            raise

    def _queue(self, rows: Rows, done: Callable[[], None]) -> None:
        pieces: list[Piece] = []
        if self._failure is None and not self._ended:
            try:
                pieces = self._assembly.accept(rows)
            except Exception as exc:  # noqa: BLE001 - also where memory runs out: it is this capture's own
                self._failure = exc
        if not pieces:
            done()
            return

        def store() -> None:
            try:
                if self._failure is None:
                    self._store(pieces, rows)
            except Exception as exc:  # noqa: BLE001 - any failure is this capture's own; kept for its reader
                self._failure = exc
            finally:
                done()

        self._submit(store)

    def _store(self, pieces: Sequence[Piece], rows: Rows) -> None:
        for piece in pieces:
            for block in piece.blocks(_BLOCK_BYTES):  # checked, hashed and written while it is in the cache
                self._checks.look(block, all_finite=rows.all_finite)
                first = block.row + self._assembly.base - rows.start
                part = slice(first, first + len(block.data))
                self._sink.write(block, rows.input_ids[part], None if rows.digests is None else rows.digests[part])

    def finish(
        self,
        token_ids: Sequence[int] | NDArray[np.int64],
        finish_reason: str,
        facts: Mapping[str, str] | None = None,
        check: FinalCheck | None = None,
    ) -> "Future[Result]":
        """Check and publish, behind the rows that were added.

        Args:
            token_ids: the final tokens of the sequence, prompt and output.
            finish_reason: "stop", "length", "prefill", ...
            facts: more for the file's metadata.
            check: has to agree, too.

        Returns:
            The future `result`: a `Result`, or the reason as an exception.
        """
        final = np.asarray(token_ids, np.int64)
        all_facts = {"finish_reason": finish_reason, **(facts or {})}

        def publish() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                with self._lock:
                    owed = self._assembly.complete(final)
                    all_facts["replayed_rows"] = str(self._assembly.replayed_rows)
                first_row, owed_ids = owed.start - self._assembly.base, final[owed.start : owed.stop]
                try:
                    self._checks.settle(first_row, owed_ids, self._sink.read_slot)
                    if check is not None:
                        self._ask(check)
                except EngineError as exc:
                    kept = self._quarantine(exc, first_row, owed_ids, owed.start, len(final), all_facts)
                    self._end_failed(exc, kept)
                    return
                result = self._sink.finish(first_row, owed_ids, owed.start, len(final), all_facts)
            except Exception as exc:  # noqa: BLE001 - told to the reader and to whoever holds the future
                self._end_failed(exc)
            else:
                self._settle(result.info.data_bytes)
                self._recorder.note_published(result)
                self.result.set_result(result)
                self._recorder.hand_over(self.path, self.request_id, None)

        self._end(publish)
        return self.result

    def _ask(self, check: FinalCheck) -> None:
        rows = np.stack([self._sink.read_back(position - self._assembly.base) for position in check.positions])
        trouble = check.judge(rows)
        if trouble is not None:
            raise EngineError(trouble)

    def _quarantine(self, cause: EngineError, first_row: int, token_ids: NDArray[np.int64], first_position: int,
                    num_tokens: int, facts: Mapping[str, str]) -> int:  # fmt: skip
        """Keep the rows that failed a check; return their bytes, 0 where nothing is kept."""
        if self.path is None or not self._recorder.may_quarantine():
            return 0
        try:
            self._sink.quarantine(str(cause), first_row, token_ids, first_position, num_tokens, facts)
        except OSError as exc:
            logger.warning("request %s: its rows can't be kept in quarantine: %s", self.request_id, describe(exc))
            return 0
        return len(token_ids) * self.spec.row_bytes

    def fail(self, reason: str | BaseException) -> None:
        """Give up: the reader gets the reason, what was written is dropped. Idempotent; nothing happens after `finish`."""
        cause = reason if isinstance(reason, BaseException) else EngineError(reason)
        self._end(lambda: self._end_failed(cause), cause)

    def discard(self) -> None:
        """Give up without a word: nobody was told the path. Idempotent; nothing happens after `finish`."""
        cause = EngineError("the request was given up")

        def drop() -> None:
            try:
                self._sink.discard()
                self._settle(0)
            finally:
                self._give_up(cause)

        self._end(drop, cause)

    def _end(self, task: Callable[[], None], cause: BaseException | None = None) -> None:
        """Queue the last task, unless another one was; an interrupt on the way leaves the end to the next who asks for it."""
        with self._lock:
            if self._ended:
                return
            try:
                self._ended = True
                self._failure = cause or self._failure
                self._submit(task)
            except BaseException as exc:
                self._ended, self._failure = False, exc
                raise

    def _give_up(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)

    def _end_failed(self, cause: BaseException, kept_bytes: int = 0) -> None:
        reason = describe(cause)
        error: BaseException = cause
        if not isinstance(cause, LayertapError):
            error = HiddenStatesError(f"request {self.request_id}: {reason}", reason=reason, request_id=self.request_id)
            error.__cause__ = cause
        try:
            self._sink.fail(reason)  # does nothing where the rows are in quarantine
            self._settle(kept_bytes)
            self._recorder.note_failed(reason, kind_of(error))
        finally:  # whatever happens, nobody waits for ever
            self._give_up(error)
            self._recorder.hand_over(self.path, self.request_id, reason)

    def _settle(self, num_bytes: int) -> None:
        if self._room is not None:
            self._room.settle(num_bytes)

    def _submit(self, task: Callable[[], None]) -> None:
        try:
            self._lane.submit(task)
        except RuntimeError:  # the recorder is closed: what still runs is told so, here and now
            self._failure = self._failure or EngineError("the engine was closed before the request was finished")
            task()


class Recorder:
    """Admits captures and owns what they share: the byte budget, the writer threads and the store's limits.

    Args:
        options: where and how.
        facts: what every file of this engine says in its metadata: engine, engine_version, compute_dtype, revision, ...
        model: the model's name or path.
        num_layers: blocks of the model.
        seen: rows of other requests, where several recorders of one engine share them.
        most_quarantined: files that are kept in quarantine.
    """

    def __init__(
        self,
        options: StoreOptions,
        *,
        model: str,
        num_layers: int,
        facts: Mapping[str, str],
        seen: SeenRows | None = None,
        most_quarantined: int = MOST_QUARANTINED,
    ) -> None:
        self.options = options
        self.budget = ByteBudget(options.byte_budget())
        self.pool = WriterPool(options.num_writer_threads)
        self.counts = Counts()
        self.room = StoreRoom(options)
        self.seen = seen or SeenRows()
        self._most_quarantined = most_quarantined
        self._model = model
        self._num_layers = num_layers
        self._facts = {"layertap_version": __version__, **facts}
        if options.ttl_seconds is not None:
            self._facts[TTL_FACT] = f"{options.ttl_seconds:g}"
        self._lock = threading.Lock()
        self._shipper: Shipper | None = None

    def ship_to(self, url: str) -> None:
        """From now on files go on to an object store.

        Raises:
            OptionError: the URL's protocol can't be had.
        """
        if self._shipper is None:
            self._shipper = Shipper(url, self.room.removed)

    def hand_over(self, path: Path | None, request_id: str, reason: str | None) -> None:
        """A request has ended, with a file or with the reason why there is none."""
        if self._shipper is not None and path is not None:
            self._shipper.take(path, request_id, reason)

    @property
    def shipped(self) -> Mapping[str, int]:
        """Files that went to an object store, by outcome."""
        return {"stored": 0, "failed": 0} if self._shipper is None else self._shipper.outcomes

    def admit(
        self,
        spec: CaptureSpec,
        *,
        request_id: str,
        path: Path | None,
        overwrite: bool = False,
        lock: bool = True,
        facts: Mapping[str, str] | None = None,
    ) -> Capture:
        """Reserve what a sequence needs, before anything is computed for it.

        Args:
            spec: what is owed.
            request_id: named in the file, its lock and its error.
            path: the file's final path (layertap.files.paths.target_path), or None to keep the rows in memory.
            overwrite: replace an existing file.
            lock: let readers wait for the file, unless the store's options say no.
            facts: more for this file's metadata (weights_version, ...).

        Raises:
            OptionError: positions outside of what can exist.
            TargetExistsError: the file exists, or another request is about to write it.
            StoreFullError: the store's quota is used up, or its file system would have less than `min_free_bytes` left.
            OSError: the folder can't be written to.
        """
        spec.window.admit(spec.prompt_len, spec.max_tokens)
        info = fmt.FileInfo(
            layers=spec.layers,
            num_rows=0,
            hidden_size=spec.hidden_size,
            dtype=spec.dtype,
            first_position=spec.candidates.start,
            prompt_len=spec.prompt_len,
            num_tokens=spec.prompt_len,
            num_layers=self._num_layers,
            model=self._model,
            facts={**self._facts, "request_id": request_id, **(facts or {})},
        )
        max_rows = len(spec.candidates)
        sink: Sink
        room: Reservation | None = None
        file: PendingFile | None = None
        try:
            if path is None:
                sink = MemorySink(spec, info)
            else:
                room = self.room.reserve(path, max_rows * (spec.row_bytes + 8))
                file = PendingFile(
                    path,
                    info,
                    max_rows,
                    overwrite=overwrite,
                    lock=lock and self.options.use_synchronization_lock,
                    fsync=self.options.fsync,
                    request_id=request_id,
                )
                sink = FileSink(file, spec)
            capture = Capture(spec, sink, self, request_id, path, room)
        except BaseException:  # a lock that stayed would make readers wait for a process that lives on
            if file is not None:
                file.discard()
            if room is not None:
                room.settle(0)
            raise
        with self._lock:
            self.counts.admitted += 1
        return capture

    def note_published(self, result: Result) -> None:
        """Count a finished capture."""
        with self._lock:
            self.counts.published += 1
            self.counts.rows += result.info.num_rows
            self.counts.num_bytes += result.info.num_rows * result.info.row_bytes

    def may_quarantine(self) -> bool:
        """Whether one more file may be kept in quarantine; counts it."""
        with self._lock:
            if self.counts.quarantined >= self._most_quarantined:
                return False
            self.counts.quarantined += 1
            return True

    def note_failed(self, reason: str, kind: str) -> None:
        """Count a failed one, by its kind."""
        logger.warning("hidden states of a request are lost: %s", reason)
        with self._lock:
            self.counts.failures[kind] = self.counts.failures.get(kind, 0) + 1

    def close(self) -> None:
        """Finish what was handed over, then end the threads. Captures that weren't ended stay for their engine to fail."""
        self.pool.close()
        if self._shipper is not None:
            self._shipper.close()


def describe(cause: BaseException) -> str:
    """The reason as one sentence for a person: an OS error without its Python dress."""
    if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, LayertapError):
        where = f": {cause.filename}" if cause.filename else ""
        return f"{os.strerror(cause.errno)}{where}"
    return str(cause) or type(cause).__name__
