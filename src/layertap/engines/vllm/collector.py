"""From rows to captures, in the one worker that publishes: admission, rows of all pipeline stages, endings.

Reservations (folder, lock, temporary file) run on their own threads beside the forward; the step in which a request first runs
waits for them, so a reader never learns a path before its lock is held.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from pathlib import Path

import numpy as np
import torch

from layertap.assembly import Rows
from layertap.engines.vllm.messages import Finish, Order
from layertap.engines.vllm.unpack import GatherRoom, Running, Unpacker
from layertap.files.publish import write_error
from layertap.writing.kinds import kind_of
from layertap.writing.recorder import Capture, Recorder, describe

logger = logging.getLogger(__name__)

FAILURES = "failures"
_ADMISSION_THREADS = 4


class Collector(Unpacker):
    """See the module.

    Args:
        recorder: the corridor.
        taps: layer ids of this worker.
        dtype: compute dtype of the rows.
        num_stages: pipeline stages that deliver rows; a capture is finished when all have.
        gather: see Unpacker; only with one stage, since the parts of a row must carry the same step.
        on_admitted: called when a reservation was made, or refused.
    """

    def __init__(
        self,
        recorder: Recorder,
        taps: tuple[int, ...],
        dtype: torch.dtype,
        num_stages: int = 1,
        gather: GatherRoom | None = None,
        on_admitted: "Callable[[Future[Capture]], None] | None" = None,
    ) -> None:
        self._on_admitted = on_admitted
        self.recorder = recorder
        self._num_stages = num_stages
        self._captures: dict[str, Future[Capture]] = {}
        self._stages_done: dict[str, int] = {}
        self._finishes: dict[str, tuple[Running | None, Finish]] = {}
        self._admissions = ThreadPoolExecutor(_ADMISSION_THREADS, thread_name_prefix="layertap-admit")
        self._fresh: list[Future[Capture]] = []
        super().__init__(taps, dtype, gather if num_stages == 1 else None)

    def counts(self) -> dict[str, float]:
        """The recorder's numbers."""
        recorder = self.recorder
        return {
            **super().counts(),
            "rows": recorder.counts.rows,
            "bytes": recorder.counts.num_bytes,
            "files": recorder.counts.published,
            "quarantined": recorder.counts.quarantined,
            "waited_seconds": recorder.budget.waited_seconds,
            "in_flight_bytes": recorder.budget.in_flight_bytes,
            **{f"{FAILURES}.{kind}": count for kind, count in list(recorder.counts.failures.items())},
        }

    def order(self, order: Order) -> None:
        """Begin a capture; its reservation runs beside the forward."""
        capture = self._admissions.submit(self._admit, order)
        if self._on_admitted is not None:
            capture.add_done_callback(self._on_admitted)
        self._fresh.append(capture)
        self._queue(lambda: self._captures.__setitem__(order.request_id, capture))
        super().order(order)

    def wait_for_admissions(self, timeout_seconds: float) -> None:
        """Wait until the locks of new captures are held."""
        if self._fresh:
            wait_for_futures(self._fresh, timeout_seconds)
            self._fresh.clear()

    def rows_of_stage(self, request_id: str, rows: Rows) -> None:
        """Rows of another pipeline stage."""
        self._queue(lambda: self._add(request_id, rows))

    def stage_lost(self, request_id: str, reason: str) -> None:
        """Another stage lost rows of a request."""
        self._queue(lambda: self._lose(request_id, reason))

    def stage_done(self, request_id: str) -> None:
        """Another stage has sent all rows of a request."""
        self._queue(lambda: self._stage_done(request_id))

    def stage_gone(self) -> None:
        """Another stage has ended: what it hadn't said to be done, it will never be."""

        def task() -> None:
            for request_id in list(self._captures):
                self._fail(request_id, "a pipeline stage of the engine ended before it had sent all rows")

        self._queue(task)

    def emit(self, running: Running, rows: Rows) -> None:
        self._add(running.order.request_id, rows)

    def fail(self, running: Running, reason: str) -> None:
        self._fail(running.order.request_id, reason)

    def end(self, running: Running | None, finish: Finish) -> None:
        self._finishes[finish.request_id] = (running, finish)
        self._stage_done(finish.request_id)

    def close(self) -> None:
        super().close()
        for request_id in list(self._captures):  # ended here, but another stage hasn't said so
            self._fail(request_id, "the engine was closed before the request was finished")
        self._admissions.shutdown()
        self.recorder.close()

    def _admit(self, order: Order) -> Capture:
        path = Path(order.path)
        try:
            return self.recorder.admit(
                order.spec,
                request_id=order.public_id,
                path=path,
                overwrite=order.overwrite,
                facts={name: value for name, value in (("tag", order.tag), ("lora", order.lora)) if value is not None},
            )
        except FileExistsError as exc:  # no error file: beside somebody else's file it would be taken for that one's
            self.recorder.note_failed(f"request {order.public_id}: {describe(exc)}", kind_of(exc))
            raise
        except Exception as exc:
            reason = describe(exc)
            self.recorder.note_failed(f"request {order.public_id}: {reason}", kind_of(exc))
            try:
                write_error(path, reason, order.public_id)
            except OSError as second:
                logger.warning("request %s: the reason can't be put on record: %s", order.public_id, describe(second))
            self.recorder.hand_over(path, order.public_id, reason)
            raise

    def _capture(self, request_id: str) -> Capture | None:
        future = self._captures.get(request_id)
        if future is None or future.exception() is not None:
            return None
        return future.result()

    def _fail(self, request_id: str, reason: str) -> None:
        capture = self._capture(request_id)
        if capture is not None:
            capture.fail(reason)

    def _add(self, request_id: str, rows: Rows) -> None:
        capture = self._capture(request_id)
        if capture is not None:
            capture.add(rows)
        elif rows.release is not None:
            rows.release()

    def _stage_done(self, request_id: str) -> None:
        done = self._stages_done.get(request_id, 0) + 1
        if done < self._num_stages:
            self._stages_done[request_id] = done
            return
        self._stages_done.pop(request_id, None)
        running, finish = self._finishes.pop(request_id)
        capture = self._capture(request_id)
        self._captures.pop(request_id, None)
        if capture is None or running is None or running.failure is not None:
            return
        if finish.failure is not None:
            capture.fail(finish.failure)
        else:
            capture.finish(np.asarray(finish.token_ids, np.int64), finish.finish_reason)
