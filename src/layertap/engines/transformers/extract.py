"""Extraction: prefill only, no cache, no head, no block past the deepest layer asked for.

Jobs are pulled as they are needed, batched, run the way the self-test allows, and handed to their captures; the index of each
job is yielded once its rows are all handed over. A consumer that stops pulling stops the engine. A job that can't be run fails by
itself: a batch that breaks is run again one by one, and one that doesn't fit the device's memory in halves.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layertap.assembly import Rows
from layertap.capture.spans import Spans, within
from layertap.engines.base import ExtractJob
from layertap.engines.fp8 import storage
from layertap.engines.transformers.budget import ARENAS, RESERVE, Plan, arena_bytes, make_plan, measure
from layertap.engines.transformers.offload import SLOTS, Streamer, spread
from layertap.engines.transformers.packing import Item, Packer, Way
from layertap.engines.transformers.passes import Passes
from layertap.engines.transformers.selftest import Routes, choose_routes
from layertap.engines.transformers.spot_check import SpotCheck
from layertap.engines.transformers.switching import QUICK_SWITCHES
from layertap.engines.transformers.tap import Arena, Arenas
from layertap.engines.transformers.trees import Tree, overlap
from layertap.engines.transformers.weights import Weights
from layertap.errors import LayertapError, PromptError, UnsupportedModelError
from layertap.writing.checks import FinalCheck

__all__ = ["Extractor"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CPU_BUDGET_TOKENS = 2048
_CUDA_BUDGET_TOKENS = 16_384
_CPU_ARENAS = 2
_CPU_ARENA_BYTES = 512 * 2**20
_LEAST_BUDGET_TOKENS = 256
_COMPILE_AFTER_TOKENS = 150_000
_STOPPED = "the extraction was stopped before this prompt's turn"


@dataclass(frozen=True, slots=True)
class _Flight:
    """A batch whose rows are on their way to the host."""

    jobs: Sequence[ExtractJob]
    wanted: Sequence[range]
    places: Sequence[Spans]
    """Rows of the arena that hold the wanted ones of each job, in order."""
    arena: Arena
    step: int


class Extractor:
    """Runs extract jobs on the weights of one model. Thread-safe: forwards of several callers take turns.

    Args:
        weights: the model, loaded as deep as the jobs ask.
        max_model_len: longest sequence that is allowed.
        budget_tokens: most tokens of a shared forward; None chooses for the device.
    """

    def __init__(self, weights: Weights, *, max_model_len: int, budget_tokens: int | None = None) -> None:
        self._weights = weights
        self._max_model_len = max_model_len
        self._vocab_size = weights.layout.vocab_size
        self._hidden_size = weights.layout.hidden_size
        device = weights.source.device
        self._is_cuda = device.type == "cuda"
        self._fixed_budget = budget_tokens is not None
        self.budget_tokens = budget_tokens or (_CUDA_BUDGET_TOKENS if self._is_cuda else _CPU_BUDGET_TOKENS)
        self._arena_bytes = arena_bytes(weights.room) if self._is_cuda else _CPU_ARENA_BYTES
        self._arenas = (
            Arenas(device, ARENAS, ARENAS * self._arena_bytes) if self._is_cuda else Arenas(device, _CPU_ARENAS)
        )
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._passes: Passes | None = None
        self._depth = -1
        self._step = 0
        self._tokens_run = 0
        self._compiled = False
        self._may_compile = self._is_cuda
        self.routes: Routes | None = None
        self.plan: Plan | None = None
        """How weights and tokens share the device's memory, where not all weights fit in it."""
        self.spot_check = SpotCheck()

    def prepare(self, depth: int) -> Routes:
        """Load at least `depth` blocks and decide which ways they can go."""
        with self._lock:
            return self._prepare(depth)

    def between_forwards(self, change: Callable[[], T]) -> T:
        """Run what changes the weights while no forward runs."""
        with self._lock:
            return change()

    def _prepare(self, depth: int) -> Routes:
        if depth > self._depth:
            self._passes = None  # they hold weights that a deeper model may have no room beside
        model = self._weights.at_least(depth)
        # Another model than before: a deeper one, or the complete one of generation, into which new weights are loaded.
        if self.routes is None or self._passes is None or self._passes.model is not model:
            self._depth = max(depth, self._weights.depth)
            try:
                self.routes = choose_routes(model, self._weights.layout, self._depth)
            except UnsupportedModelError:
                self._weights.forget()
                raise
            self._passes = Passes(model, self._weights.layout, self.routes.attention)
            self._compiled = False
            if self._weights.streamer is not None:
                self._share_out(self._weights.streamer, self._passes, self.routes)
        return self.routes

    def _share_out(self, streamer: Streamer, passes: Passes, routes: Routes) -> None:
        """Give the device's memory to tokens and blocks, as the costs measured on it say."""
        weights, room = self._weights, self._weights.room or 0
        costs = measure(passes, streamer, routes.way, self._depth, self._max_model_len)
        block = streamer.block_bytes
        arenas = ARENAS * self._arena_bytes if self._is_cuda else 0
        left = room - room // RESERVE - weights.other_bytes - SLOTS * block - arenas
        plan = make_plan(
            costs,
            num_blocks=self._depth,
            block_bytes=block,
            room=max(left, 0),
            tokens=self.budget_tokens,
            fixed=self._fixed_budget or not self._is_cuda,
        )
        streamer.arrange(spread(plan.resident, self._depth))
        self.budget_tokens = plan.tokens
        self.plan = plan
        logger.info(
            "%d of %d blocks stay on the device, the others come from host memory in %.1f ms each; a block computes %.0f tokens "
            "in that time, %d tokens a forward hide the copies; a forward has up to %d",
            plan.resident,
            self._depth,
            costs.seconds_per_copy * 1e3,
            costs.seconds_per_copy / costs.seconds_per_token,
            plan.needed,
            plan.tokens,
        )

    def run(self, jobs: Iterable[ExtractJob], *, share_prefixes: bool = False) -> Iterator[int]:
        """Run jobs; yields the index of each whose rows have been handed over, or that has failed.

        With `share_prefixes`, what jobs that follow one another have in common at their beginning is run once, where the model
        allows it.

        Raises:
            ModelError: the weights can't be loaded, or the model's rows can't be taken, not even for the first job.
        """
        packer: Packer[ExtractJob] = Packer("alone", self.budget_tokens, overlap=_overlap)
        flights: deque[_Flight] = deque()
        with ExitStack() as leaving:
            leaving.enter_context(self._arenas.one_more_user())
            if self._is_cuda:
                leaving.enter_context(QUICK_SWITCHES.here())
            leaving.callback(self._abandon, packer, flights)
            others, batched = False, False
            for job in jobs:
                if self._admit(packer, job, share_prefixes, others=others):
                    others = True
                else:
                    yield job.index
                while packer.full:
                    batched = True
                    yield from self._advance(packer, flights)
            if batched and self._is_cuda:
                packer.longest_first()
            while len(packer):
                yield from self._advance(packer, flights)
            while flights:
                yield from self._deliver(flights.popleft())

    def _admit(self, packer: Packer[ExtractJob], job: ExtractJob, share_prefixes: bool, *, others: bool) -> bool:
        """Queue a job, or fail it and return False; `others` says that some of this run could be queued."""
        spec = job.capture.spec
        try:
            self._check(job)
        except PromptError as exc:
            job.capture.fail(exc)
            return False
        try:
            routes = self.prepare(max(spec.layers))
        except LayertapError as exc:
            if not others:  # a model that can't be loaded or run is the matter of no single prompt
                raise
            job.capture.fail(exc)  # that wants deeper layers than those before it
            return False
        limit = self._arena_bytes // spec.row_bytes
        packer.way = "shared" if share_prefixes and routes.shared else routes.way
        packer.max_together = routes.max_together
        packer.budget = min(self.budget_tokens, max(limit, _LEAST_BUDGET_TOKENS))
        packer.push(Item(job, len(job.token_ids), (spec.layers, spec.dtype)))
        return True

    def _check(self, job: ExtractJob) -> None:
        ids = np.asarray(job.token_ids, np.int64)
        if not len(ids):
            raise PromptError("the prompt is empty")
        if len(ids) > self._max_model_len:
            raise PromptError(f"the prompt has {len(ids)} tokens, the model allows {self._max_model_len}")
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(outside):
            raise PromptError(f"token id {int(outside[0])} isn't in the vocabulary, which has {self._vocab_size} ids")

    def _advance(self, packer: Packer[ExtractJob], flights: deque[_Flight]) -> Iterator[int]:
        """Run the next batch; on CUDA the one before it is delivered while it runs."""
        batch = packer.pop()
        for outcome in self._execute(batch.way, [item.value for item in batch.items]):
            if isinstance(outcome, _Flight):
                flights.append(outcome)
            else:
                yield outcome.index
            while len(flights) > (1 if self._is_cuda else 0):
                yield from self._deliver(flights.popleft())

    def _execute(self, way: Way, jobs: list[ExtractJob]) -> Iterator[_Flight | ExtractJob]:
        """Launch jobs together; where that breaks, in smaller parts. Yields what flies, and each job that failed."""
        try:
            flight = self._launch(way, jobs)
        except torch.OutOfMemoryError as exc:
            has_shrunk = self._arenas.shrink()
            torch.cuda.empty_cache()
            if has_shrunk:
                logger.warning("out of memory: rows of fewer batches are on their way to the host from now on")
                parts: list[tuple[Way, list[ExtractJob]]] = [(way, jobs)]
            elif len(jobs) == 1:
                jobs[0].capture.fail(f"the memory is too small for {len(jobs[0].token_ids)} tokens: {exc}")
                yield jobs[0]
                return
            else:
                self.budget_tokens = max(self.budget_tokens // 2, _LEAST_BUDGET_TOKENS)
                logger.warning("out of memory: %d tokens a batch from now on", self.budget_tokens)
                half = len(jobs) // 2
                parts = [(way, jobs[:half]), (way, jobs[half:])]
        except Exception as exc:
            if self._compiled and way in ("packed", "shared"):
                logger.warning("compiled blocks failed (%s: %s); they run as they are", type(exc).__name__, exc)
                self._stop_compiling()
                yield from self._execute(way, jobs)
                return
            if way == "alone":
                logger.exception("prompt %d failed", jobs[0].index)
                jobs[0].capture.fail(f"the forward failed: {type(exc).__name__}: {exc}")
                yield jobs[0]
                return
            logger.warning(
                "a %s batch of %d failed (%s: %s); its prompts run alone", way, len(jobs), type(exc).__name__, exc
            )
            parts = [("alone", [job]) for job in jobs]
        else:
            yield flight
            return
        for part_way, part in parts:
            yield from self._execute(part_way, part)

    def _launch(self, way: Way, jobs: list[ExtractJob]) -> _Flight:
        spec = jobs[0].capture.spec
        wanted = [_wanted(job) for job in jobs]
        if way == "shared":
            tree = Tree.of([job.token_ids for job in jobs])
            places = [within(rows, part.start, part.stop) for rows, part in zip(tree.rows, wanted, strict=True)]
            in_arena: Sequence[range] = tree.own
        else:
            begins = [*accumulate(map(len, wanted), initial=0)]
            places = [((begin, end),) if begin < end else () for begin, end in pairwise(begins)]
            in_arena = wanted
        num_rows = sum(map(len, in_arena))
        dtype, width = storage(spec.dtype, self._hidden_size)
        arena = self._arenas.acquire(num_rows, len(spec.layers), width, dtype)
        try:
            with self._lock:
                # again: somebody else's deeper call, or one that failed, may have come between
                self._prepare(max(spec.layers))
                assert self._passes is not None
                self._compile_when_worth_it(way, sum(len(job.token_ids) for job in jobs))
                self._passes.run(way, [job.token_ids for job in jobs], wanted, spec.layers, arena.rows)
                arena.fetch(self._stream, _token_ids(jobs, in_arena))
                self._step += 1
                return _Flight(jobs, wanted, places, arena, self._step)
        except BaseException:
            arena.give_back()
            raise

    def _compile_when_worth_it(self, way: Way, num_tokens: int) -> None:
        """Compiling pays on CUDA only when many tokens follow, which those that went before are the best sign of."""
        self._tokens_run += num_tokens
        if (
            self._may_compile
            and not self._compiled
            and way in ("packed", "shared")
            and self._tokens_run > _COMPILE_AFTER_TOKENS
        ):
            assert self._passes is not None
            self._passes.compile_packed()
            self._compiled = True

    def _stop_compiling(self) -> None:
        """A machine without a C compiler, for one, can't."""
        with self._lock:
            self._may_compile = self._compiled = False
            self._passes = None

    def _deliver(self, flight: _Flight) -> Iterator[int]:
        try:
            self._hand_over(flight)
        finally:  # also on Ctrl-C while the writer makes us wait: an arena that is lost would be missed for ever
            flight.arena.give_back()
        yield from (job.index for job in flight.jobs)

    def _hand_over(self, flight: _Flight) -> None:
        flight.arena.wait()
        looked = flight.arena.digests()
        for job, positions, places in zip(flight.jobs, flight.wanted, flight.places, strict=True):
            check = None
            if positions and self.spot_check.due():
                rows = torch.cat([flight.arena.host_rows(begin, end) for begin, end in places])
                trouble = self._spot_checked(job, positions, rows)
                if trouble is not None:
                    check = _refusal(positions, trouble)
            start = positions.start
            for begin, end in places:
                data, release = flight.arena.share(begin, end)
                ids = np.asarray(job.token_ids[start : start + end - begin], np.int64)
                slots = slice(0, len(job.capture.spec.layers))
                job.capture.add(
                    Rows(
                        step=flight.step,
                        start=start,
                        input_ids=ids,
                        slots=slots,
                        data=data,
                        release=release,
                        digests=None if looked is None else looked[0][begin:end],
                        all_finite=looked is not None and bool(looked[1][begin:end].all()),
                        is_bounded=True,
                    )
                )
                start += end - begin
            job.capture.finish(job.token_ids, "prefill", check=check)

    def _spot_checked(self, job: ExtractJob, positions: range, rows: Tensor) -> str | None:
        layers = job.capture.spec.layers
        try:
            with self._lock:
                self._prepare(max(layers))
                assert self._passes is not None
                again = torch.empty(rows.shape, dtype=rows.dtype, device=self._weights.source.device)
                self._passes.run("alone", [job.token_ids], [positions], layers, again)
        except torch.OutOfMemoryError:  # beside the next batch there may be no room; the next one in turn is checked
            return None
        trouble = self.spot_check.compare(
            rows, again.to(rows.device), layers, self._weights.source.dtype, positions.start
        )
        if trouble is not None:
            logger.error("prompt %d: %s", job.index, trouble)
        return trouble

    def _abandon(self, packer: Packer[ExtractJob], flights: deque[_Flight]) -> None:
        """Tell the readers of what was pulled but won't be delivered; nothing is left after a normal end."""
        for flight in flights:
            flight.arena.wait()
            flight.arena.give_back()
            for job in flight.jobs:
                job.capture.fail(_STOPPED)
        while len(packer):
            for item in packer.pop().items:
                item.value.capture.fail(_STOPPED)


def _refusal(positions: range, trouble: str) -> FinalCheck:
    """What keeps rows that were found wrong from being published."""
    return FinalCheck(positions[:1], lambda _rows: trouble)


def _overlap(one: ExtractJob, other: ExtractJob) -> int:
    return overlap(one.token_ids, other.token_ids)


def _wanted(job: ExtractJob) -> range:
    """Positions of the prompt whose rows may be owed."""
    candidates = job.capture.spec.candidates
    return range(candidates.start, min(candidates.stop, len(job.token_ids)))


def _token_ids(jobs: Sequence[ExtractJob], wanted: Sequence[range]) -> NDArray[np.int64]:
    """The tokens of the wanted rows, in their order."""
    parts = [job.token_ids[span.start : span.stop] for job, span in zip(jobs, wanted, strict=True)]
    return np.concatenate([np.asarray(part, np.int64) for part in parts])
