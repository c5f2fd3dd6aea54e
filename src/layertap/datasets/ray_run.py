"""`layertap extract --ray`: the same run by the actors of a Ray cluster, into one data set on a file system that all of them see.

The driver reads the input, cuts it into pieces and hands them out. Each actor (one a GPU) has a model and writes shards of its
own. A sample counts as done when the driver, and nobody else, has given its index part its name: what an actor wrote before it
died and the driver hadn't published is computed again by another one, and can't appear twice.
"""

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from layertap.datasets.extraction import RunOptions, RunReport, counted, known_date, leave_lookup
from layertap.datasets.inputs import InputFile, Record
from layertap.datasets.manifest import Manifest
from layertap.datasets.ray_pieces import Holding, Pieces
from layertap.datasets.ray_worker import ExtractionWorker, Hello, Offer, Status, Tally
from layertap.datasets.resume import leftovers, locked_folder, prepare_folder, refuse_changed_input
from layertap.datasets.verify import PartReport
from layertap.datasets.writer import Compression, DatasetWriter, file_info
from layertap.errors import EngineError, LayertapError, OptionError
from layertap.files.paths import whole_path
from layertap.files.publish import sync_folder

logger = logging.getLogger(__name__)

_QUEUED = 2  # the next piece is there when one ends
_POLL_SECONDS = 1.0
_MOST_DEATHS_IN_A_ROW = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Which part of the cluster a run takes."""

    actors: int | None = None
    """Default one for each GPU."""
    cpus: float = 1.0
    """CPUs that each actor asks for, and threads that it computes with where it has no GPU."""

    def __post_init__(self) -> None:
        if self.actors is not None and self.actors < 1:
            raise OptionError(f"ray_actors: expected at least 1, got {self.actors}")
        if not self.cpus > 0:
            raise OptionError(f"ray_cpus: expected more than 0, got {self.cpus}")


@dataclass(slots=True)
class ActorProgress:
    """What one actor did, for people."""

    name: str
    where: str = "starting"
    pid: int | None = None
    num_samples: int = 0
    died: bool = False


@dataclass(slots=True, kw_only=True)
class RayReport(RunReport):
    """What a Ray run did."""

    actors: list[ActorProgress] = field(default_factory=list)

    @property
    def num_died(self) -> int:
        """Actors that died and were replaced."""
        return sum(actor.died for actor in self.actors)


@dataclass(slots=True, eq=False)
class _Actor:
    handle: Any
    progress: ActorProgress
    starting: Any
    running: list[Any] = field(default_factory=list)
    """References of `run` calls, in the order of `holding.queued`."""
    flushing: Any = None
    asking: Any = None
    asked_at: float = 0.0
    holding: Holding = field(default_factory=Holding)
    status: Status = field(default_factory=lambda: Status(offers=[]))
    published: Tally = field(default_factory=Tally)

    def references(self) -> Iterator[Any]:
        yield from (one for one in (self.starting, *self.running, self.flushing, self.asking) if one is not None)


def extract_with_ray(
    model: str,
    source: InputFile,
    folder: str | Path,
    options: RunOptions,
    *,
    ray_options: RayOptions | None = None,
    on_start: Callable[[RunReport], None] | None = None,
    on_checked: Callable[[PartReport], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    **engine_options: Any,
) -> RayReport:
    """Extract an input file into a data set on a Ray cluster; continue what an earlier run left, with Ray or without.

    Takes the cluster that this process is connected to, or that `RAY_ADDRESS` or `ray start` name; starts one on this machine
    if there is none.

    Args:
        model: folder, hub id or GGUF file, seen by every machine.
        source: the input; only this process reads it.
        folder: the data set, on a file system that every machine sees.
        options: as of `extract_dataset`; layout "shards".
        ray_options: how many actors.
        on_start: gets the report when the folder is ready.
        on_checked: called for each part of an existing set that was verified.
        should_stop: asked about once a second.
        engine_options: of `LLM`: engine, dtype, device, ...

    Raises:
        OptionError: as `extract_dataset`, or Ray isn't installed.
        EngineError: actors die again and again.
        StoreFullError: the disk is full.
    """
    if options.layout != "shards":
        raise OptionError(
            "layout: with Ray only 'shards': a file of its own can't be told from one that a dead actor left"
        )
    if str(engine_options.get("device") or "").startswith("cuda:"):
        raise OptionError("device: Ray gives each actor its GPU; say 'cuda' or nothing")
    ray = _connected_ray()
    folder = whole_path(folder)
    model = os.path.expanduser(model)
    model = str(Path(model).absolute()) if Path(model).exists() else model
    options = replace(options, template_date=options.template_date or known_date(folder) or date.today())
    report = RayReport(folder=folder)
    started = time.monotonic()
    with locked_folder(folder):
        run = _Run(ray, model, engine_options, source, options, ray_options or RayOptions(), report, should_stop)
        try:
            manifest = run.start()
            if manifest is not None:
                prepared = prepare_folder(folder, manifest, check_rows=options.check_rows, on_part=on_checked)
                report.damaged = prepared.damaged
                refuse_changed_input(source, prepared.done)
                if on_start is not None:
                    on_start(report)
                run.compute(prepared.manifest, Pieces(counted(source, prepared.done, report)))
                leave_lookup(folder, prepared.manifest.id)
        finally:
            run.close()
            report.seconds = time.monotonic() - started
        if manifest is not None:
            for leftover in leftovers(folder, prepared.manifest):
                leftover.unlink(missing_ok=True)
    return report


def _connected_ray() -> Any:
    try:
        import ray
    except ImportError as exc:
        raise OptionError("ray: Ray isn't installed; pip install 'layertap[ray]'") from exc
    if not ray.is_initialized():
        quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if os.environ.get("RAY_ADDRESS"):
            ray.init(**quiet)
            return ray
        if (started := started_cluster()) is not None:
            with contextlib.suppress(ConnectionError):  # its name is left, and the cluster is gone
                ray.init(address=started, **quiet)
                return ray
        # rows never pass through Ray's object store: it holds records of the input
        ray.init(address="local", include_dashboard=False, object_store_memory=200 << 20, **quiet)
    return ray


def started_cluster() -> str | None:
    """The cluster of `ray start` on this machine.

    Ray's "auto" would also take one that another program here has started for itself, and that ends with it.
    """
    folder = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    with contextlib.suppress(OSError):
        return Path(folder, "ray", "ray_current_cluster").read_text().strip() or None
    return None


class _Run:
    """The driver's loop."""

    def __init__(
        self,
        ray: Any,
        model: str,
        engine_options: dict[str, Any],
        source: InputFile,
        options: RunOptions,
        ray_options: RayOptions,
        report: RayReport,
        should_stop: Callable[[], bool],
    ) -> None:
        self._ray = ray
        self._arguments = (model, engine_options, source, options)
        self._options = options
        self._report = report
        self._should_stop = should_stop
        self._stopping = False
        self._deaths_in_a_row = 0
        self._actors: list[_Actor] = []
        self._gone = Tally()
        """What died actors had published."""
        self._manifest: Manifest | None = None
        on_gpu = engine_options.get("device") != "cpu" and ray.cluster_resources().get("GPU", 0) >= 1
        count = ray_options.actors or (int(ray.cluster_resources()["GPU"]) if on_gpu else 0)
        if not count:
            raise OptionError(
                "ray_actors: the cluster has no GPU (or device is 'cpu'), so say how many actors there are to be"
            )
        room = ray.cluster_resources().get("CPU", 0)
        if count * ray_options.cpus > room:
            logger.warning(
                "%d actors of %g CPUs don't fit into the %g CPUs of the cluster: some wait until it has grown",
                count,
                ray_options.cpus,
                room,
            )
        self._make = ray.remote(
            num_cpus=ray_options.cpus, num_gpus=1 if on_gpu else 0, max_restarts=0, concurrency_groups={"asking": 1}
        )(_with_groups(ray))
        for _ in range(count):
            self._add_actor()

    def start(self) -> Manifest | None:
        """Wait for the first actor; None if the run is stopped before."""
        while not any(actor.starting is None for actor in self._actors):
            if self._should_stop():
                self._report.stopped = True
                return None
            self._handle_what_is_ready()
        return self._manifest

    def compute(self, manifest: Manifest, pieces: Pieces) -> None:
        """Hand out all pieces, and publish what comes back, until everything is published."""
        self._manifest = manifest
        with DatasetWriter(self._report.folder, manifest, self._options.shards) as writer:
            while True:
                if self._should_stop() and not self._stopping:
                    self._stopping = self._report.stopped = True
                    for actor in self._actors:
                        actor.handle.stop.remote()
                if not self._hand_out(pieces, manifest):
                    return
                for record in self._handle_what_is_ready(pieces):
                    reason = f"{record.where}: the actors that computed it died, three times"
                    self._report.note_failure(record.where, reason)
                    writer.add_failure(
                        index=record.index, source_hash=record.source_hash, sample_id=None, reason=reason
                    )

    def close(self) -> None:
        """End the actors; what they hadn't published is lost."""
        for actor in self._actors:
            self._ray.kill(actor.handle)

    def _add_actor(self) -> None:
        name = f"r{secrets.token_hex(4)}"
        handle = self._make.remote(*self._arguments, name)
        progress = ActorProgress(name)
        self._report.actors.append(progress)
        self._actors.append(_Actor(handle, progress, handle.start.remote()))

    def _hand_out(self, pieces: Pieces, manifest: Manifest) -> bool:
        """Give actors what they can take; false when everything is published."""
        busy = False
        for place in range(_QUEUED):  # one each before anybody gets two
            for actor in self._actors:
                if actor.starting is not None or len(actor.running) > place or actor.flushing is not None:
                    continue
                piece = None if self._stopping else pieces.next()
                if piece is not None:
                    pieces.give(piece, actor.holding)
                    actor.running.append(actor.handle.run.remote(self._report.folder, manifest, piece.records))
        now = time.monotonic()
        for actor in self._actors:
            if actor.starting is None and actor.holding.open and not actor.running and actor.flushing is None:
                if self._stopping and actor.status.tally.num_samples == actor.published.num_samples:
                    continue  # stopped before it came to them
                actor.flushing = actor.handle.flush.remote()
            if actor.running and actor.asking is None and now - actor.asked_at >= _POLL_SECONDS:
                actor.asking, actor.asked_at = actor.handle.status.remote(), now
            busy = busy or bool(actor.running) or actor.flushing is not None
        return busy or (pieces.pending and not self._stopping)

    def _handle_what_is_ready(self, pieces: Pieces | None = None) -> list[Record]:
        """Wait a moment for answers and take them; returns records that are given up."""
        references = [reference for actor in self._actors for reference in actor.references()]
        self._ray.wait(references, num_returns=1, timeout=_POLL_SECONDS)
        ready, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        given_up: list[Record] = []
        for actor in list(self._actors):
            for reference in [one for one in actor.references() if one in ready]:
                try:
                    answer = self._ray.get(reference)
                except self._ray.exceptions.RayTaskError as exc:
                    cause = exc.cause
                    if isinstance(cause, LayertapError | OSError):
                        raise cause from None
                    if reference == actor.starting:
                        raise EngineError(f"an actor can't start: {exc}") from exc
                    # its engine died, if it didn't itself
                    given_up += self._bury(actor, exc, pieces)
                    break
                except self._ray.exceptions.RayError as exc:
                    given_up += self._bury(actor, exc, pieces)
                    break
                self._take(actor, reference, answer)
        self._count()
        return given_up

    def _take(self, actor: _Actor, reference: Any, answer: Any) -> None:
        if reference == actor.starting:
            actor.starting = None
            self._welcome(actor, answer)
            return
        if reference == actor.asking:
            actor.asking = None
        elif reference == actor.flushing:
            actor.flushing = None
        else:
            actor.running.remove(reference)
            actor.holding.queued.popleft()
            self._deaths_in_a_row = 0
        now, before = answer.tally, actor.status.tally
        if now.num_samples + now.num_failed >= before.num_samples + before.num_failed:
            actor.status = replace(answer, offers=[])
        for offer in answer.offers:
            self._publish(actor, offer)

    def _welcome(self, actor: _Actor, hello: Hello) -> None:
        actor.progress.pid = hello.pid
        actor.progress.where = f"{hello.node}, process {hello.pid}: {hello.engine}"
        if self._manifest is None:
            self._manifest = hello.manifest
            return
        differences = list(self._manifest.differences(hello.manifest))
        if differences:
            raise OptionError(
                f"the actor on {hello.node} would make other rows than the rest of the cluster: "
                + "; ".join(
                    line.replace("the data set", "the run").replace("this run", hello.node) for line in differences
                )
            )

    def _publish(self, actor: _Actor, offer: Offer) -> None:
        """Give a part its name; from here on its samples are done."""
        failed = [actor.holding.open.pop(index) for index, _ in offer.failed]
        for index in offer.done:
            del actor.holding.open[index]  # what the actor wasn't given can't be in it
        offer.temporary.replace(offer.path)
        if self._options.shards.fsync:
            sync_folder(offer.path.parent)
        for record, (_, reason) in zip(failed, offer.failed, strict=True):
            self._report.note_failure(record.where, reason)
        actor.published += offer.tally

    def _bury(self, actor: _Actor, exc: BaseException, pieces: Pieces | None) -> list[Record]:
        """An actor died: another one takes its place."""
        self._actors.remove(actor)
        actor.progress.died = True
        actor.progress.num_samples = actor.published.num_samples
        self._gone += actor.published
        logger.warning(
            "actor %s (%s) died; its unpublished work is done again", actor.progress.name, actor.progress.where
        )
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > _MOST_DEATHS_IN_A_ROW:
            raise EngineError(f"{self._deaths_in_a_row} actors died one after the other; the last said: {exc}") from exc
        with contextlib.suppress(Exception):
            self._ray.kill(actor.handle)
        self._add_actor()
        return [] if pieces is None else pieces.take_back(actor.holding)

    def _count(self) -> None:
        report = self._report
        for actor in self._actors:
            actor.progress.num_samples = actor.status.tally.num_samples
        total = sum((actor.status.tally for actor in self._actors), self._gone)
        for name in ("num_samples", "num_tokens", "num_shared", "num_shared_tokens"):  # failures are noted one by one
            setattr(report, name, getattr(total, name))
        # what died actors had not shown is known to nobody
        report.num_unshown = sum(actor.status.num_unshown for actor in self._actors)
        report.compression = Compression()
        for one in (actor.status.compression for actor in self._actors):
            report.compression.add(one.row_bytes, one.stored_bytes, one.seconds)
        if self._manifest is not None:
            report.num_bytes = (report.num_tokens - report.num_shared_tokens) * file_info(self._manifest).row_bytes


def _with_groups(ray: Any) -> type:
    """The worker with its quick methods in a thread of their own."""

    class Worker(ExtractionWorker):
        status = ray.method(concurrency_group="asking")(ExtractionWorker.status)
        stop = ray.method(concurrency_group="asking")(ExtractionWorker.stop)

    return Worker
