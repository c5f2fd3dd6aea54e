"""The spot check of vLLM's server: one captured request in many is asked for again, once it has been answered, and compared.

The same server computes the final tokens as a prompt, and its rows are compared with those that were published; a file that differs
goes to quarantine, with the reason for its reader. One check runs at a time. What can't be checked is counted, too: files whose
first row isn't the first token's (the tokens before aren't in them), prompts with images or embeddings, files that were gone
already, requests that came while a check was running, and weights that changed in between. Imports no engine until it is used.
"""

import asyncio
import json
import logging
import os
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from layertap.errors import HiddenStatesError
from layertap.files.format import FileInfo, identity
from layertap.files.locks import wait_for_writer
from layertap.files.publish import set_aside
from layertap.files.read import check_rows, read_header
from layertap.files.reap import remove_idle
from layertap.serving.gate import App, Message

logger = logging.getLogger(__name__)

MARK = "layertap_spot_check"
"""In the scope of the requests that are checks themselves."""
_KIND = "generate"
_MOST_SECONDS = 300.0
_SCOPE = ("type", "asgi", "http_version", "scheme", "server", "client", "root_path", "app")
_CHANGING = (
    "/collective_rpc",
    "/finish_weight_update",
    "/load_lora_adapter",
    "/sleep",
    "/start_weight_update",
    "/unload_lora_adapter",
    "/update_weights",
    "/wake_up",
)

Post = Callable[[dict[str, Any]], Awaitable[tuple[int, bytes]]]
"""Sends a body to the server's completions; gives the status and the answer."""


class _SkippedError(Exception):
    """It can't be checked, and why."""


def changes_weights(path: str) -> bool:
    """Whether a route of vLLM may leave other weights behind."""
    return path.endswith(_CHANGING)


def can_be_computed_again(body: Mapping[str, Any]) -> bool:
    """Whether a request's rows follow from its token ids alone."""
    if body.get("prompt_embeds") is not None:
        return False
    messages = body.get("messages") or ()
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in parts)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Some rows of a published file, uint8 [rows, layers, bytes of a slot], and the token ids up to the last of them."""

    info: FileInfo
    status: os.stat_result
    first: int
    token_ids: NDArray[np.int64]
    rows: NDArray[np.uint8]


class SpotChecks:
    """Which requests are checked, one at a time, and what came of it.

    Args:
        one_in: every so-manieth request with a capture.
        registry: where it is counted, under the names of the embedded server.
        most_rows: of a longer file a stretch of so many is compared.
    """

    def __init__(self, one_in: int, registry: CollectorRegistry = REGISTRY, *, most_rows: int = 256) -> None:
        from layertap.engines.transformers.spot_check import SpotCheck

        self._check = SpotCheck(one_in=one_in)
        self._outcomes, self._worst = _metrics(registry)
        self._most_rows = most_rows
        self._running: asyncio.Task[str] | None = None

    def due(self) -> bool:
        """Whether the next request is one of them; one that comes while a check is running is skipped."""
        if not self._check.due():
            return False
        if self._running is not None and not self._running.done():
            self._outcomes.labels(_KIND, "skipped").inc()
            return False
        return True

    def start(
        self, handle: Mapping[str, Any], body: Mapping[str, Any], post: Post, unchanged: Callable[[], bool]
    ) -> None:
        """Check a request that was answered, in the background of the running event loop.

        Args:
            handle: of its file.
            body: of the request.
            post: asks the server.
            unchanged: whether its weights are still those that the request began with.
        """
        self._running = asyncio.get_running_loop().create_task(self.run(handle, body, post, unchanged))

    async def run(
        self, handle: Mapping[str, Any], body: Mapping[str, Any], post: Post, unchanged: Callable[[], bool]
    ) -> str:
        """The same in the foreground: "passed", "failed" or "skipped". Raises nothing."""
        outcome = "skipped"
        try:
            async with asyncio.timeout(_MOST_SECONDS):
                outcome = await self._checked(handle, body, post, unchanged)
        except (_SkippedError, HiddenStatesError, OSError) as exc:  # a timeout is an OSError
            why = str(exc) or "it took too long"
            logger.info("request %s can't be spot-checked: %s", handle.get("hidden_states_id"), why)
        except Exception:
            logger.exception("the spot check of request %s broke off", handle.get("hidden_states_id"))
        finally:
            self._outcomes.labels(_KIND, outcome).inc()
            self._worst.labels(_KIND).set(self._check.worst)
        return outcome

    async def _checked(
        self, handle: Mapping[str, Any], body: Mapping[str, Any], post: Post, unchanged: Callable[[], bool]
    ) -> str:
        if not can_be_computed_again(body):
            raise _SkippedError("its rows follow from more than its token ids")
        path, name = Path(handle["hidden_states_path"]), str(handle["hidden_states_id"])
        given = await asyncio.to_thread(_read, path, name, self._most_rows)
        end = given.first + len(given.rows)
        status, answer = await post(_body(body.get("model"), given, end))
        if status != 200:
            raise _SkippedError(f"the server answered {status}: {answer[:300].decode(errors='replace')}")
        told = json.loads(answer)["choices"][0]["kv_transfer_params"]
        return await asyncio.to_thread(self._compare, path, given, told, unchanged)

    def _compare(self, path: Path, given: _Stretch, told: Mapping[str, Any], unchanged: Callable[[], bool]) -> str:
        own = Path(told["hidden_states_path"])
        try:
            again = _read(own, str(told["hidden_states_id"]), self._most_rows, given)
        finally:
            remove_idle(own)
        if not unchanged():
            raise _SkippedError("the server's weights may have changed since")
        reason = self._differs(given, again)
        if reason is None:
            return "passed"
        logger.error("%s: %s", path, reason)
        try:
            logger.error("moved aside: %s", set_aside(path, reason, given.status))
        except OSError as exc:  # its reader has removed it, or another request's file is there by now
            logger.error("%s can't be moved aside: %s", path, exc)
        return "failed"

    def _differs(self, given: _Stretch, again: _Stretch) -> str | None:
        import torch

        dtype = getattr(torch, given.info.dtype, torch.uint8)
        rows, others = (torch.from_numpy(one.rows).view(dtype) for one in (given, again))
        computed = getattr(torch, given.info.facts.get("compute_dtype", ""), torch.bfloat16)
        return self._check.compare(rows, others, given.info.layers, computed, given.first)


def _body(model: Any, given: _Stretch, end: int) -> dict[str, Any]:
    """The model's name is the request's own, so it is the same LoRA adapter; a salt of its own keeps it from reading any cache."""
    asked = {
        "capture": True,
        "layers": list(given.info.layers),
        "positions": [given.first, end],
        "save_dtype": given.info.dtype,
    }
    named = {} if model is None else {"model": model}
    return named | {
        "prompt": given.token_ids.tolist(),
        "max_tokens": 1,
        "temperature": 0.0,
        "cache_salt": secrets.token_hex(16),
        "kv_transfer_params": asked,
    }


def _read(path: Path, name: str, most_rows: int, wanted: _Stretch | None = None) -> _Stretch:
    """A stretch of a request's file, somewhere in it; of the check's own, all of what was `wanted`."""
    wait_for_writer(path, _MOST_SECONDS)
    status = path.stat()
    header = read_header(path)
    info = header.info
    if info.facts.get("request_id", name) != name:
        raise _SkippedError("its file was replaced by another request's")
    if wanted is None and (info.first_position or not info.num_rows or info.packed is not None):
        raise _SkippedError("the tokens before its first row aren't in its file")
    first = random.randint(0, max(0, info.num_rows - most_rows)) if wanted is None else 0
    count = min(most_rows, info.num_rows)
    if wanted is not None and (info.first_position, count) != (wanted.first, len(wanted.rows)):
        raise _SkippedError(
            f"{info.num_rows} rows from position {info.first_position} came back, others were asked for"
        )
    with path.open("rb") as file:
        if identity(os.fstat(file.fileno())) != identity(status):
            raise _SkippedError("its file was replaced")
        file.seek(header.data_offset + first * info.row_bytes)
        rows = np.frombuffer(bytearray(file.read(count * info.row_bytes)), np.uint8).reshape(count, info.row_bytes)
        file.seek(header.data_offset + info.num_rows * info.row_bytes)
        token_ids = np.frombuffer(file.read(8 * (first + count)), "<i8").astype(np.int64)
    check_rows(header, rows, token_ids[first:], str(path), first)
    return _Stretch(info, status, first, token_ids, rows.reshape(count, len(info.layers), -1))


async def ask(app: App, scope: Mapping[str, Any], body: Mapping[str, Any]) -> tuple[int, bytes]:
    """Ask the server itself, with the key of the request that is checked.

    Args:
        app: the server.
        scope: of that request.
        body: for its completions.

    Returns:
        The status and the answer.
    """
    raw = json.dumps(body).encode()
    keys = [(key, value) for key, value in scope["headers"] if key.lower() == b"authorization"]
    more = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    own: MutableMapping[str, Any] = {key: scope[key] for key in _SCOPE if key in scope} | {
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [*keys, *more, (b"x-request-id", b"spot-check")],
        "state": {},
        MARK: True,
    }
    sent = False
    status, parts = 500, []

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # nobody hangs up
        sent = True
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await app(own, receive, send)
    return status, b"".join(parts)


@cache
def _metrics(registry: CollectorRegistry) -> tuple[Counter, Gauge]:
    outcomes = Counter(
        "layertap_spot_checks",
        "Sequences that were computed a second time, by outcome.",
        ("kind", "outcome"),
        registry=registry,
    )
    for outcome in ("passed", "failed", "skipped"):
        outcomes.labels(_KIND, outcome)
    worst = Gauge(
        "layertap_spot_check_worst_error",
        "Largest median relative error of a layer.",
        ("kind",),
        registry=registry,
        multiprocess_mode="max",  # of several processes of vLLM's server
    )
    worst.labels(_KIND)
    return outcomes, worst
