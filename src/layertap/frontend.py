"""The front end of the embedded engine: prompts and options in, jobs to the engine, outputs back.

`LLM` and `AsyncLLM` are two doors to this one core. A request is admitted as a whole (all its files are reserved, or it is refused)
before anything is computed for it.
"""

import functools
import itertools
import secrets
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from layertap.capture.layers import LayersLike, resolve_layers
from layertap.capture.options import StoreOptions
from layertap.capture.request import CaptureSpec, RequestOptions
from layertap.engines.base import Delta, Engine, ExtractJob, GenerateJob, TopLogprobs
from layertap.errors import EngineError, ExtractionError, LayertapError, OptionError
from layertap.files.paths import SUFFIX, new_request_id, safe_name, target_path
from layertap.files.tags import reserve_tag
from layertap.outputs import CompletionOutput, Extracted, Logprob, RequestOutput
from layertap.params import SamplingParams
from layertap.prompts import Prompt, PromptReader
from layertap.writing.recorder import Capture, Recorder
from layertap.writing.sinks import Result

_PENDING_FILES = 256  # finished prompts whose files are still on their way, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    """A request's capture, resolved against the model and the store."""

    options: RequestOptions
    layers: tuple[int, ...]
    dtype: str


class Frontend:
    """The core behind LLM and AsyncLLM.

    Args:
        engine: an embedded engine.
        options: the store's options.
        stores: files may be written (a storage or a connector was configured).
        layers: layers to take by default.
        weights_version: said in each file's metadata, where given; may be changed between requests.
    """

    def __init__(
        self,
        engine: Engine,
        options: StoreOptions,
        *,
        stores: bool,
        layers: LayersLike | None,
        weights_version: str | None,
    ) -> None:
        self.engine = engine
        self.info = engine.info
        self.options = options
        self.weights_version = weights_version
        self.prompts = PromptReader(engine.info, engine.tokenizer)
        self.recorder = Recorder(
            options, model=self.info.model, num_layers=self.info.num_layers, facts=self.info.facts()
        )
        self._stores = stores
        self._layers = layers
        self._running: dict[str, Request] = {}
        self._lock = threading.Lock()
        self._id_prefix = secrets.token_hex(8)
        self._ids = itertools.count()
        if layers is not None:
            resolve_layers(layers, self.info.num_layers)  # refuse a bad default now, not with the first request

    def plan(self, kv_transfer_params: Mapping[str, Any] | None) -> CapturePlan | None:
        """Resolve a request's capture options; None where nothing is to be taken.

        Raises:
            OptionError: a bad option, or there is nowhere to write.
        """
        options = self.options.capture_of(kv_transfer_params, stores=self._stores)
        return None if options is None else self._resolve(options)

    def _resolve(self, options: RequestOptions) -> CapturePlan:
        layers = options.layers if options.layers is not None else self._layers
        if layers is None:
            raise OptionError("layers: none were given, neither to the LLM nor with the request")
        dtype = options.save_dtype or self.options.save_dtype or self.info.dtype
        return CapturePlan(options=options, layers=resolve_layers(layers, self.info.num_layers), dtype=dtype)

    def spec(self, plan: CapturePlan, prompt: Prompt, max_tokens: int) -> CaptureSpec:
        """What one sequence owes."""
        return CaptureSpec(
            layers=plan.layers,
            dtype=plan.dtype,
            hidden_size=self.info.hidden_size,
            prompt_len=len(prompt.token_ids),
            max_tokens=max_tokens,
            window=plan.options.window,
        )

    def start(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_update: Callable[["Request"], None],
        request_id: str | None = None,
    ) -> "Request":
        """Admit a request of one prompt and queue its sequences; see `admit`."""
        (request,) = self.admit([prompt], params, on_update, request_id)
        self.submit([request])
        return request

    def admit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        on_update: Callable[["Request"], None],
        request_id: str | None = None,
        *,
        owner: str = "",
        may_replace: Callable[[Path], None] | None = None,
    ) -> "list[Request]":
        """Reserve everything that a request needs, all of it or nothing; `submit` (or `withdraw`) has to follow.

        Args:
            prompts: checked; several of one HTTP request. Ids and files get `-<prompt>-<choice>`, except the first of all.
            params: with any n.
            on_update: called on the engine's thread whenever the output of one changed; must not block.
            request_id: unique among what runs; made if None.
            owner: whose tags these are, where several clients share the store.
            may_replace: raises if what is at a path may not be replaced by this client.

        Raises:
            OptionError, TargetExistsError, StoreFullError, OSError: nothing is reserved.
        """
        self.engine.check(params)
        request_id = request_id or new_request_id("cmpl")
        plan = self.plan(params.kv_transfer_params)
        requests = [
            self._new_request(place, prompt, params, on_update, request_id) for place, prompt in enumerate(prompts)
        ]
        with self._lock:
            for request in requests:
                if request.output.request_id in self._running:
                    raise OptionError(f"request_id: {request_id!r} is running already")
            self._running.update({request.output.request_id: request for request in requests})
        try:
            if plan is not None:
                for place, request in enumerate(requests):
                    self._reserve(plan, place, request, request_id, may_replace)
                if plan.options.tag is not None:
                    handles = [handle(capture) for request in requests for capture in request.captures if capture]
                    reserve_tag(self.options.shared_storage_path, plan.options.tag, request_id, handles, owner=owner)
        except BaseException:
            self.withdraw(requests)
            raise
        return requests

    def _new_request(
        self,
        place: int,
        prompt: Prompt,
        params: SamplingParams,
        on_update: Callable[["Request"], None],
        request_id: str,
    ) -> "Request":
        limit = self.info.max_model_len - len(prompt.token_ids)
        max_tokens = limit if params.max_tokens is None else min(params.max_tokens, limit)
        name = f"{request_id}-{place}-0" if place else request_id
        return Request(name, prompt, params, max_tokens, self.engine.tokenizer, on_update, self._forget)

    def _reserve(
        self,
        plan: CapturePlan,
        place: int,
        request: "Request",
        request_id: str,
        may_replace: Callable[[Path], None] | None,
    ) -> None:
        options = plan.options
        base = target_path(self.options, request_id, options.hidden_states_path)
        spec = self.spec(plan, request.prompt, request.max_tokens)
        version = self.weights_version
        for choice in range(request.params.n):
            suffix = f"-{place}-{choice}" if place or choice else ""
            path = base.with_name(base.name.removesuffix(SUFFIX) + suffix + SUFFIX) if suffix else base
            if options.overwrite and may_replace is not None:
                may_replace(path)
            capture = self.recorder.admit(
                spec,
                request_id=request_id + suffix,
                path=path,
                overwrite=options.overwrite,
                facts={} if version is None else {"weights_version": version},
            )
            request.adopt(choice, capture)

    def submit(self, requests: "Sequence[Request]") -> None:
        """Queue admitted requests. May wait while too many wait already.

        Raises:
            EngineError: the engine is closed; nothing of the requests goes on.
        """
        try:
            for request in requests:
                for choice in range(request.params.n):
                    self.engine.submit(request.job(choice))
        except BaseException as exc:
            for request in requests:
                self.abort(request.output.request_id)
                for capture in request.captures:
                    if capture is not None:
                        capture.fail(exc)
                self._forget(request)
            raise

    def withdraw(self, requests: "Sequence[Request]") -> None:
        """Give up what was admitted and not submitted, without a word: nobody was told of it."""
        for request in requests:
            for capture in request.captures:
                if capture is not None:
                    capture.discard()
            self._forget(request)

    def abort(self, request_id: str) -> None:
        """End a running request; its reader is told. Unknown ids are ignored."""
        with self._lock:
            request = self._running.get(request_id)
        if request is not None:
            for job_id in request.job_ids:
                self.engine.abort(job_id)

    @property
    def num_running(self) -> int:
        """Sequences that run or wait."""
        with self._lock:
            return sum(request.params.n for request in self._running.values())

    @property
    def default_layers(self) -> tuple[int, ...]:
        """The layers that are taken where a request names none; empty if there are none."""
        return () if self._layers is None else resolve_layers(self._layers, self.info.num_layers)

    @property
    def num_running_tokens(self) -> int:
        """Tokens of what runs: prompts, and what was generated so far."""
        with self._lock:
            outputs = [request.output for request in self._running.values()]
        return sum(
            len(output.prompt_token_ids) + sum(len(choice.token_ids) for choice in output.outputs) for output in outputs
        )

    def _forget(self, request: "Request") -> None:
        with self._lock:
            self._running.pop(request.output.request_id, None)

    def extract(
        self,
        prompts: Iterable[Any],
        *,
        options: RequestOptions,
        storage: Path | None,
        share_prefixes: bool = False,
    ) -> Generator[Extracted, None, None]:
        """Prefill prompts; yield results as they finish, then raise ExtractionError if some failed.

        Args:
            prompts: of any form that PromptReader takes, also an iterator that never ends.
            options: layers, positions, save_dtype, overwrite.
            storage: a folder for files, or None for memory.
            share_prefixes: what prompts that follow one another have in common at their beginning may be computed once.

        Raises:
            OptionError: at once, before anything is iterated.
        """
        return self._extract(prompts, self._resolve(options), storage, share_prefixes)

    def _extract(
        self, prompts: Iterable[Any], plan: CapturePlan, storage: Path | None, share_prefixes: bool
    ) -> Generator[Extracted, None, None]:
        failures: list[tuple[int, str]] = []
        captures: dict[int, Capture] = {}
        run = f"extract-{self._id_prefix}-{next(self._ids)}"

        def jobs() -> Iterator[ExtractJob]:
            for index, item in enumerate(prompts):
                try:
                    prompt = item if isinstance(item, Prompt) else self.prompts.read(item)
                    name = f"{run}-{index}"
                    capture = self.recorder.admit(
                        self.spec(plan, prompt, 0),
                        request_id=name,
                        path=None if storage is None else storage / (safe_name(name) + SUFFIX),
                        overwrite=plan.options.overwrite,
                        lock=False,  # nobody learns the path before the file is there
                        facts={} if self.weights_version is None else {"weights_version": self.weights_version},
                    )
                except (LayertapError, OSError) as exc:
                    failures.append((index, str(exc)))
                    continue
                captures[index] = capture
                # once, here: a list of Python numbers costs every later step some time per token
                ids = np.asarray(prompt.token_ids, np.int64)
                yield ExtractJob(index=index, token_ids=ids, capture=capture)

        try:
            waiting: dict[int, Future[Result]] = {}
            for index in self.engine.extract(jobs(), share_prefixes=share_prefixes):
                waiting[index] = captures.pop(index).result
                yield from self._finished(waiting, failures, at_most=_PENDING_FILES)
            yield from self._finished(waiting, failures, at_most=0)
        finally:  # also where the consumer stopped
            for capture in captures.values():
                capture.discard()
        if failures:
            raise ExtractionError(sorted(failures))

    def _finished(
        self, waiting: dict[int, "Future[Result]"], failures: list[tuple[int, str]], at_most: int
    ) -> Iterator[Extracted]:
        for index in list(waiting):
            future = waiting[index]
            if not future.done() and len(waiting) <= at_most:
                continue
            del waiting[index]
            try:
                result = future.result()
            except (LayertapError, OSError) as exc:
                failures.append((index, str(exc)))
                continue
            yield Extracted(index, result)

    def close(self) -> None:
        """End the engine and the writer."""
        self.engine.close()
        self.recorder.close()


class Request:
    """One running request: the deltas of its sequences, gathered into one output."""

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        max_tokens: int,
        tokenizer: Any,
        on_update: Callable[["Request"], None],
        on_end: Callable[["Request"], None],
    ) -> None:
        self.output = RequestOutput(request_id=request_id, prompt=prompt.text, prompt_token_ids=prompt.token_ids)
        self._token_ids: list[list[int]] = [[] for _ in range(params.n)]
        self.output.outputs = [CompletionOutput(index=i, token_ids=ids) for i, ids in enumerate(self._token_ids)]
        self.job_ids = [f"{request_id}#{choice}" for choice in range(params.n)]
        self.prompt = prompt
        self.params = params
        self.max_tokens = max_tokens
        self.captures: list[Capture | None] = [None] * params.n
        self.error: BaseException | None = None
        self.lock = threading.Lock()
        self._tokenizer = tokenizer
        self._on_update = on_update
        self._on_end = on_end

    def adopt(self, choice: int, capture: Capture) -> None:
        """Take a choice's capture and note its handle."""
        self.captures[choice] = capture
        self.output.outputs[choice].kv_transfer_params = handle(capture)
        self.output.kv_transfer_params = self.output.outputs[0].kv_transfer_params

    def job(self, choice: int) -> GenerateJob:
        """What the engine is told about one choice."""
        seed = None if self.params.seed is None else self.params.seed + choice
        return GenerateJob(
            request_id=self.job_ids[choice],
            prompt_ids=self.prompt.token_ids,
            params=self.params.replace(n=1, seed=seed),
            max_tokens=self.max_tokens,
            capture=self.captures[choice],
            on_delta=functools.partial(self.take, choice),
        )

    def take(self, choice: int, delta: Delta) -> None:
        """Add what one step gave to one choice."""
        with self.lock:
            output = self.output.outputs[choice]
            self._token_ids[choice] += delta.token_ids
            output.text += delta.text
            if delta.logprobs is not None:
                self._take_logprobs(output, delta.logprobs)
            if delta.prompt_logprobs is not None and self.output.prompt_logprobs is None:
                self.output.prompt_logprobs = [
                    None if entry is None else self._decoded(entry) for entry in delta.prompt_logprobs
                ]
            if delta.finish_reason is not None:
                output.finish_reason = delta.finish_reason
                output.stop_reason = delta.stop_reason
                self.output.finished = all(other.finished() for other in self.output.outputs)
            if delta.error is not None and self.error is None:
                self.error = delta.error
            self.output.num_cached_tokens = delta.num_cached_tokens
            finished = self.output.finished
        if finished:
            self._on_end(self)
        self._on_update(self)

    def result(self) -> RequestOutput:
        """The finished output.

        Raises:
            EngineError: a sequence failed; its cause is chained.
        """
        if self.error is not None:
            raise EngineError(f"request {self.output.request_id} failed: {self.error}") from self.error
        return self.output

    def _take_logprobs(self, output: CompletionOutput, logprobs: Iterable[TopLogprobs]) -> None:
        if output.logprobs is None:
            output.logprobs, output.cumulative_logprob = [], 0.0
        for entry in logprobs:
            output.logprobs.append(self._decoded(entry))
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + entry.entries[entry.token_id][0]

    def _decoded(self, entry: TopLogprobs) -> dict[int, Logprob]:
        return {
            token: Logprob(logprob, rank, None if self._tokenizer is None else self._tokenizer.decode([token]))
            for token, (logprob, rank) in entry.entries.items()
        }


def handle(capture: Capture) -> dict[str, str]:
    """What a client finds the capture's file by."""
    return {"hidden_states_path": str(capture.path), "hidden_states_id": capture.request_id}
