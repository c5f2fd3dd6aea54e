"""What the routes of one server share."""

import time
from collections.abc import Sequence

from layertap.frontend import Frontend, Request
from layertap.serving.answers import Handles
from layertap.serving.api_errors import ApiError
from layertap.serving.book import Book
from layertap.serving.identity import ApiKeys
from layertap.serving.metrics import Metrics
from layertap.serving.session import Admission
from layertap.serving.settings import ServerSettings


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
        self.handles = Handles(front.options.handover)
        self.names = settings.served_model_names or (front.info.model,)
        self.started = time.time()
        self.ready = False
        self.num_running = 0

    def start(self) -> None:
        """Begin to serve."""
        self.ready = True

    def stop(self) -> None:
        """Stop what the server runs beside the engine."""
        self.ready = False
        self.admission.close()

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

    def take_in(self, num_sequences: int) -> None:
        """Count sequences in; `let_out` has to follow.

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

    def let_out(self, num_sequences: int) -> None:
        """Count sequences out."""
        self.num_running -= num_sequences

    def admitted(self, requests: Sequence[Request]) -> None:
        """Follow what was admitted."""
        for request in requests:
            self.book.follow(request.captures)
