"""One HTTP request while it runs: admission off the event loop, news from the engine's thread, and an end in every case.

Whoever holds a session leaves it through `close`; what still runs then is aborted. So a client that goes away, a handler that
raises and a server that stops all free the same things.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from layertap.frontend import Frontend, Request
from layertap.outputs import CompletionOutput, Logprob
from layertap.params import SamplingParams
from layertap.prompts import Prompt
from layertap.serving.handoff import refuse_anothers_file
from layertap.serving.identity import Caller

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What is new in one choice.

    Attributes:
        place: the prompt's.
        choice: within the prompt.
        text, token_ids, logprobs: what was added.
        ends: this is the choice's last piece.
        output: the choice, which may have gone on since; its finish reason and handle count only if `ends`.
    """

    place: int
    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[dict[int, Logprob]]
    ends: bool
    output: CompletionOutput


class Admission:
    """Runs what blocks (tokenizing, reserving files, queueing) on threads of its own.

    Args:
        num_threads: requests that may be in admission at once; more wait.
    """

    def __init__(self, num_threads: int = 8) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="layertap-admit")

    async def run(self, work: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        """Call `work` on a thread; if the caller goes away meanwhile, `undo` gets what it returned."""
        future = self._pool.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undo is not None and not future.cancel():
                future.add_done_callback(lambda done: None if done.exception() else undo(done.result()))
            raise

    def close(self) -> None:
        """Wait for what runs."""
        self._pool.shutdown()


class Session:
    """The running requests of one HTTP request, one per prompt. Made by `open_session`."""

    def __init__(self, front: Frontend, every_token: bool) -> None:
        self.requests: list[Request] = []
        self._front = front
        self._every_token = every_token
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._seen: dict[tuple[int, int], tuple[int, int, bool]] = {}

    def on_update(self, request: Request) -> None:
        """Wake the event loop; on the engine's thread."""
        if self._every_token or request.output.finished:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._news.set)

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return all(request.output.finished for request in self.requests)

    async def wait(self) -> None:
        """Wait for the end.

        Raises:
            EngineError: a sequence failed.
        """
        while not self.finished:
            await self._news.wait()
            self._news.clear()
        self._raise_failures()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What is new, as it comes; what a slow reader didn't take yet is put together into one piece.

        Raises:
            EngineError: a sequence failed.
        """
        while True:
            finished = self.finished
            news = [piece for place in range(len(self.requests)) for piece in self._new_pieces(place)]
            self._raise_failures()
            if news:
                yield news
            if finished:
                return
            await self._news.wait()
            self._news.clear()

    def _new_pieces(self, place: int) -> list[Piece]:
        request = self.requests[place]
        found: list[Piece] = []
        with request.lock:
            for output in request.output.outputs:
                key = (place, output.index)
                num_chars, num_tokens, ended = self._seen.get(key, (0, 0, False))
                ends = output.finish_reason is not None
                if ended or (len(output.text) == num_chars and len(output.token_ids) == num_tokens and not ends):
                    continue
                found.append(
                    Piece(
                        place=place,
                        choice=output.index,
                        text=output.text[num_chars:],
                        token_ids=output.token_ids[num_tokens:],
                        logprobs=(output.logprobs or [])[num_tokens:],
                        ends=ends,
                        output=output,
                    )
                )
                self._seen[key] = (len(output.text), len(output.token_ids), ends)
        return found

    def _raise_failures(self) -> None:
        for request in self.requests:
            if request.error is not None:
                request.result()

    def close(self) -> None:
        """Abort what still runs. Idempotent, and never waits."""
        for request in self.requests:
            if not request.output.finished:
                self._front.abort(request.output.request_id)


async def open_session(
    front: Frontend,
    admission: Admission,
    read_prompts: Callable[[], Sequence[Prompt]],
    params: SamplingParams,
    *,
    request_id: str,
    caller: Caller,
    every_token: bool,
    on_admitted: Callable[[Sequence[Request]], None],
) -> Session:
    """Tokenize, reserve and queue a request.

    Args:
        front: the core.
        admission: where that runs.
        read_prompts: tokenizes and checks.
        params: for all prompts.
        request_id: of the HTTP request.
        caller: who asks.
        every_token: whether news are wanted before the end.
        on_admitted: called once everything is reserved and before anything runs.

    Raises:
        LayertapError, OSError: nothing was started.
    """
    session = Session(front, every_token)

    def start() -> list[Request]:
        prompts = read_prompts()
        requests = front.admit(
            prompts,
            params,
            session.on_update,
            request_id,
            owner=caller.owner,
            may_replace=lambda path: refuse_anothers_file(path, caller),
        )
        on_admitted(requests)
        front.submit(requests)
        return requests

    def abort(requests: list[Request]) -> None:
        for request in requests:
            front.abort(request.output.request_id)

    session.requests = await admission.run(start, abort)
    return session
