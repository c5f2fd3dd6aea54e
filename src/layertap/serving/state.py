"""What the routes of one server share."""

import asyncio
import threading
import time
from collections.abc import Sequence

from layertap.frontend import Frontend, Request
from layertap.params import SamplingParams
from layertap.prompts import Prompt
from layertap.serving.answers import Handles
from layertap.serving.api_errors import ApiError
from layertap.serving.book import Book
from layertap.serving.handoff import FileDesk
from layertap.serving.identity import ApiKeys
from layertap.serving.metrics import Metrics
from layertap.serving.reaper import Reaper
from layertap.serving.session import Admission
from layertap.serving.settings import ServerSettings
from layertap.writing.shipping import is_object_store


class ServerState:
    """One server over one engine.

    Args:
        front: the core; closed by whoever made it.
        settings: of the HTTP side.
    """

    def __init__(self, front: Frontend, settings: ServerSettings) -> None:
        self.front = front
        self.settings = settings
        self.keys = ApiKeys(settings.api_keys)
        self.admission = Admission()
        self.book = Book()
        self.metrics = Metrics(front, self.book)
        options = front.options
        self.handles = Handles(options.handover)
        self.reaper = Reaper(
            options,
            front.recorder.room,
            delivered=self.book.fetched_paths,
            count=self.metrics.reaped,
            seconds=settings.reap_seconds,
        )
        if is_object_store(options.handover):
            front.recorder.ship_to(options.handover)
        self.desk = FileDesk(options, self.book, self._deleted)
        self.names = settings.served_model_names or (front.info.model,)
        self.started = time.time()
        self.ready = False
        self.num_running = 0  # with those that wait while the server is paused
        self.num_let_in = 0
        self._open = asyncio.Event()
        self._open.set()

    def start(self) -> None:
        """Begin to serve."""
        self.reaper.start()
        self._warm_up()
        self.ready = True

    def _warm_up(self) -> None:
        """Generate one token: weights are loaded and the way to generate is found before the first client waits for it."""
        ended = threading.Event()
        params = SamplingParams(max_tokens=1, temperature=0, extra_args={"kv_transfer_params": {"capture": False}})
        request = self.front.start(Prompt(token_ids=[0]), params, lambda _request: ended.set())
        ended.wait()
        request.result()

    def stop(self) -> None:
        """Stop what the server runs beside the engine."""
        self.ready = False
        self.admission.close()
        self.reaper.stop()

    def is_at_rest(self) -> bool:
        """Nothing is generated or written."""
        return self.front.num_running == 0 and self.book.num_writing == 0

    def model_name(self, asked: str | None) -> str:
        """The name that answers say.

        Raises:
            ApiError: no such model.
        """
        if asked is None or asked in self.names:
            return asked or self.names[0]
        raise ApiError(
            404,
            f"the model {asked!r} isn't served here; served: {', '.join(self.names)}",
            param="model",
            code="model_not_found",
        )

    async def take_in(self, num_sequences: int) -> None:
        """Count sequences in, once the server isn't paused; `let_out` has to follow.

        Raises:
            ApiError: too many run or wait.
        """
        if self.num_running and self.num_running + num_sequences > self.settings.max_running:
            raise ApiError(
                429,
                f"{self.num_running} sequences run or wait, at most {self.settings.max_running} may; try again later",
                code="overloaded",
                headers={"retry-after": "1"},
            )
        self.num_running += num_sequences
        try:
            await self._open.wait()
        except BaseException:
            self.num_running -= num_sequences
            raise
        self.num_let_in += num_sequences

    def pause(self) -> None:
        """Let new requests wait; on the event loop."""
        self._open.clear()

    def resume(self) -> None:
        """Let them in."""
        self._open.set()

    def let_out(self, num_sequences: int) -> None:
        """Count sequences out."""
        self.num_running -= num_sequences
        self.num_let_in -= num_sequences

    def admitted(self, requests: Sequence[Request]) -> None:
        """Follow what was admitted."""
        for request in requests:
            self.book.follow(request.captures)

    def _deleted(self, num_bytes: int) -> None:
        self.front.recorder.room.removed(num_bytes)
        self.metrics.reaped("deleted", 1, num_bytes)
