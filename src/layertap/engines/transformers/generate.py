"""The generation loop of the transformers engine: one thread that admits jobs, steps, samples and tells.

    submit -> waiting -> admitted into the stepper -> step by step: rows to the capture, tokens to the caller -> finished

Everything about a running request belongs to the loop's thread; other threads only queue jobs and aborts. What goes wrong
stays with the request that it belongs to: a bad option, a callback that raises, a row of logits that isn't finite. A forward
that raises takes those with it that were in it, tells each the reason, and the next job starts with a fresh cache.
"""

import gc
import logging
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layertap.assembly import Rows
from layertap.capture.blocks import Blocks
from layertap.engines.base import Delta, GenerateJob, ModelInfo
from layertap.engines.transformers.batching import BatchedStepper, kv_bytes_per_token
from layertap.engines.transformers.bench import Bench
from layertap.engines.transformers.budget import device_room
from layertap.engines.transformers.gathering import Gathering
from layertap.engines.transformers.generation_check import GenerationCheck
from layertap.engines.transformers.running import Running, as_error, start
from layertap.engines.transformers.sampler import Draw, sample
from layertap.engines.transformers.single import SingleStepper
from layertap.engines.transformers.spot_check import SpotCheck
from layertap.engines.transformers.stepping import Step, Stepper
from layertap.engines.transformers.stopping import Finish
from layertap.engines.transformers.switching import QUICK_SWITCHES
from layertap.engines.transformers.trial import Verdict, find_way
from layertap.errors import EngineError, OptionError, UnsupportedModelError
from layertap.memory import memory_bytes
from layertap.writing.recorder import Capture

__all__ = ["GenerationOptions", "Generator"]

logger = logging.getLogger(__name__)

_LEAST_KV_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How much a generator may take.

    Attributes:
        max_num_seqs: sequences generated at once; default 8 on the CPU, 256 elsewhere.
        max_num_batched_tokens: tokens of one packed forward; default 512 on the CPU, 8192 elsewhere.
        kv_cache_bytes: room for keys and values; default a sixteenth of the memory on the CPU, half of what is free elsewhere.
        max_waiting: jobs that may wait; `submit` blocks above.
        seed: of the generator that requests without a seed draw from; default none, so that every run differs.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int | None = None
    max_waiting: int = 4096
    seed: int | None = None


class Generator:
    """Generates with a loaded model, which it never changes: it works on a private view of the same weights.

    Args:
        model: a causal language model, fully loaded.
        tokenizer: for text and stop strings; None generates tokens only.
        info: the model's facts.
        options: sizes.
        spot_check: which finished sequences are computed again, and what came of it; none without it.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        info: ModelInfo,
        options: GenerationOptions | None = None,
        spot_check: SpotCheck | None = None,
    ) -> None:
        self._bench = Bench(model, info.num_layers, info.hidden_size, info.vocab_size)
        self._tokenizer = tokenizer
        self._info = info
        self._options = options or GenerationOptions()
        self._device = next(model.parameters()).device
        self._shared = torch.Generator(self._device)
        if self._options.seed is None:
            self._shared.seed()
        else:
            self._shared.manual_seed(self._options.seed)
        self._spot_check = spot_check or SpotCheck(one_in=0)
        self._check: GenerationCheck | None = None
        self._deciding = threading.Lock()
        self._verdict: Verdict | None = None
        self._stepper: Stepper | None = None
        self._gathering: Gathering | None = None
        self._running: dict[str, Running] = {}
        self._draws: dict[str, Draw] = {}
        self._wake = threading.Condition()
        self._waiting: deque[GenerateJob] = deque()
        self._ids: set[str] = set()
        self._aborted: set[str] = set()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def verdict(self) -> Verdict:
        """How this model generates, and why; found out now if nothing was generated yet."""
        with self._deciding:
            if self._verdict is None:
                self._verdict = find_way(self._bench, max_len=self._info.max_model_len)
                logger.info("%s generates %s", self._info.model, self._verdict)
            return self._verdict

    def submit(self, job: GenerateJob) -> None:
        """Queue a job; blocks while `max_waiting` jobs wait. Failures come as its last Delta.

        Raises:
            OptionError: the request id is in use.
            EngineError: the generator is closed.
        """
        with self._wake:
            while not self._closed and len(self._waiting) >= self._options.max_waiting and not self._on_loop():
                self._wake.wait()
            if self._closed:
                raise EngineError("the engine is closed")
            if job.request_id in self._ids:
                raise OptionError(f"request id {job.request_id!r} is in use by a running request")
            self._ids.add(job.request_id)
            self._waiting.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="layertap-generate", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def abort(self, request_id: str) -> None:
        """End a generation; its last Delta says "abort". Unknown ids are ignored."""
        with self._wake:
            if request_id in self._ids:
                self._aborted.add(request_id)
                self._wake.notify_all()

    def close(self) -> None:
        """End what runs with an error, and the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            thread = self._thread
        if thread is not None and not self._on_loop():
            thread.join()

    def _on_loop(self) -> bool:
        return threading.current_thread() is self._thread

    def _loop(self) -> None:
        with torch.inference_mode():
            while self._next_round():
                try:
                    self._admit()
                    if self._stepper is not None and self._running:
                        with QUICK_SWITCHES.here() if self._device.type == "cuda" else nullcontext():
                            self._deliver(self._stepper.step(self._choose))
                except Exception as error:
                    logger.exception("a generation step failed")
                    self._restart(error)
        self._end_everything(EngineError("the engine was closed while the request ran"))

    def _next_round(self) -> bool:
        """Wait for work, serve aborts; false once closed."""
        with self._wake:
            while not (self._closed or self._waiting or self._running or self._aborted):
                self._wake.wait()
            aborted, self._aborted = self._aborted, set()
            dropped = [job for job in self._waiting if job.request_id in aborted]
            if dropped:
                self._waiting = deque(job for job in self._waiting if job.request_id not in aborted)
                self._wake.notify_all()
            closed = self._closed
        for job in dropped:
            self._end_job(job, Finish("abort"), [])
        if aborted:
            for run in [run for run in self._running.values() if run.job.request_id in aborted]:
                self._end(run, Finish("abort"))
        return not closed

    def _admit(self) -> None:
        while True:
            with self._wake:
                room = self._stepper is None or len(self._running) < self._stepper.max_sequences
                if not (self._waiting and room):
                    return
                job = self._waiting.popleft()
                self._wake.notify_all()
            try:
                run = start(job, self._info, self._tokenizer)
                if self._stepper is None:
                    self._stepper = self._make_stepper()
                self._check_room(run, self._stepper)
            except Exception as error:  # noqa: BLE001 - it is this job's failure
                self._end_job(job, Finish("error"), [], as_error(error))
                continue
            self._running[run.key] = run
            self._stepper.add(run.live)

    def _check_room(self, run: Running, stepper: Stepper) -> None:
        if run.live.max_len > stepper.capacity:
            raise EngineError(
                f"the request may need {run.live.max_len} tokens (prompt and max_tokens), the cache has room for "
                f"{stepper.capacity}: lower max_tokens or raise kv_cache_bytes"
            )

    def _make_stepper(self) -> Stepper:
        way, attention = self.verdict.way, self.verdict.attention
        options = self._options
        if way == "refused":
            raise UnsupportedModelError(f"{self._info.model} can't generate with hidden states: {self.verdict.reason}")
        on_cpu = self._device.type == "cpu"
        model, found = self._bench.view(attention)
        if way == "batched":
            return self._make_batched(model, found, on_cpu)
        return SingleStepper(
            model,
            found,
            use_cache=way == "single",
            max_sequences=min(options.max_num_seqs or 4, 4),
            max_len=self._info.max_model_len,
        )

    def _make_batched(self, model: nn.Module, found: Blocks, on_cpu: bool) -> Stepper:
        options = self._options
        max_sequences = options.max_num_seqs or (8 if on_cpu else 256)
        self._gathering = Gathering(max_sequences)
        kv_tokens = self._kv_tokens(model, max_sequences)
        while True:
            try:
                return BatchedStepper(
                    model,
                    found,
                    kv_tokens=kv_tokens,
                    max_batch_tokens=options.max_num_batched_tokens or (512 if on_cpu else 8192),
                    max_sequences=max_sequences,
                )
            except MemoryError as error:
                # transformers counts a mask of all queries over the whole cache, whether one is made or not
                if kv_tokens <= _LEAST_KV_TOKENS:
                    raise
                kv_tokens = max(kv_tokens // 2, _LEAST_KV_TOKENS)
                logger.info("a cache of %d tokens instead: %s", kv_tokens, error)

    def _kv_tokens(self, model: nn.Module, max_sequences: int) -> int:
        config: Any = model.config
        itemsize = next(model.parameters()).dtype.itemsize
        per_token = kv_bytes_per_token(config.get_text_config(decoder=True), itemsize)
        room = self._options.kv_cache_bytes or _free_bytes(self._device)
        return int(max(_LEAST_KV_TOKENS, min(room // per_token, max_sequences * self._info.max_model_len)))

    def _choose(self, keys: Sequence[str], logits: Tensor) -> list[int]:
        runs = [self._running.get(key) for key in keys]
        known = [i for i, run in enumerate(runs) if run is not None]
        tokens = [0] * len(keys)
        if known:
            rows = [run.row for run in runs if run is not None]
            asked = logits if len(known) == len(keys) else logits[known]
            for i, draw in zip(known, sample(asked, rows, self._shared), strict=True):
                self._draws[keys[i]] = draw
                tokens[i] = max(draw.token_id, 0)
        return tokens

    def _deliver(self, step: Step) -> None:
        draws, self._draws = self._draws, {}
        self._hand_over(step.rows if self._gathering is None else self._gathering.through(step.rows))
        for key, error in step.failed.items():
            failed = self._running.get(key)
            if failed is not None:
                self._end(failed, Finish("error"), as_error(error))
        for key, draw in draws.items():
            run = self._running.get(key)
            if run is None:
                continue
            if draw.error is not None:
                self._end(run, Finish("error"), EngineError(draw.error))
                continue
            delta = run.take(draw)
            if run.finish is not None:
                self._end(run, run.finish, last=delta)
            else:
                self._tell(run, delta)

    def _hand_over(self, found: Iterable[tuple[str, Rows]]) -> None:
        for key, rows in found:
            run = self._running.get(key)
            if run is not None and run.job.capture is not None:
                run.job.capture.add(rows)

    def _tell(self, run: Running, delta: Delta) -> None:
        try:
            run.job.on_delta(delta)
        except Exception as error:
            logger.exception("the callback of request %s raised", run.job.request_id)
            self._end(run, Finish("error"), as_error(error))

    def _end(self, run: Running, finish: Finish, error: BaseException | None = None, last: Delta | None = None) -> None:
        if self._gathering is not None:
            self._hand_over(self._gathering.rest(run.key))
        del self._running[run.key]
        if self._stepper is not None:
            self._stepper.remove(run.key)
        self._end_job(run.job, finish, [*run.prompt_ids, *run.row.output_ids], error, last)

    def _end_job(
        self,
        job: GenerateJob,
        finish: Finish,
        token_ids: list[int],
        error: BaseException | None = None,
        last: Delta | None = None,
    ) -> None:
        """Settle the capture, then tell the caller; afterwards the id is free."""
        if job.capture is not None:
            if finish.reason in ("stop", "length"):
                self._finish(job.capture, token_ids, finish.reason)
            else:
                job.capture.fail(error if error is not None else "the request was aborted")
        with self._wake:
            self._ids.discard(job.request_id)
            self._aborted.discard(job.request_id)
        try:
            job.on_delta(last if last is not None else Delta(finish_reason=finish.reason, error=error))
        except Exception:
            logger.exception("the callback of request %s raised", job.request_id)

    def _finish(self, capture: Capture, token_ids: list[int], reason: str) -> None:
        try:
            if self._check is None:
                self._check = GenerationCheck(self._spot_check, self._bench.model, self.verdict)
            check = self._check.of(capture.spec, token_ids)
        except Exception as error:
            logger.exception("a generated sequence couldn't be computed again")
            capture.fail(f"the spot check couldn't compute the sequence again: {type(error).__name__}: {error}")
        else:
            capture.finish(token_ids, reason, check=check)

    def _restart(self, error: Exception) -> None:
        """A forward failed: those in it are told, the next job gets a fresh cache."""
        stepper, self._stepper = self._stepper, None
        self._draws = {}
        if stepper is not None:
            stepper.close()
        for run in list(self._running.values()):
            self._end(run, Finish("error"), as_error(error))
        # The error, which callers keep, leads to every variable of the forward, and modules and hooks hold one another: without
        # this the cache would stay beside the next one.
        traceback.clear_frames(error.__traceback__)
        del stepper
        gc.collect()

    def _end_everything(self, reason: EngineError) -> None:
        for run in list(self._running.values()):
            self._end(run, Finish("error"), reason)
        with self._wake:
            waiting, self._waiting = list(self._waiting), deque()
        for job in waiting:
            self._end_job(job, Finish("error"), [], reason)
        if self._stepper is not None:
            self._stepper.close()
            self._stepper = None


def _free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return memory_bytes() // 16
    room = device_room(device, None)  # memory that torch keeps for the next who wants it is free, too
    return (torch.accelerator.get_memory_info(device)[0] if room is None else room) // 2
