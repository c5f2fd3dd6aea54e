"""The blocking client."""

import os
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import httpx

from layertap.client.protocol import Call, Handle, Protocol, Send, Sleep, Steps, as_tensors, key_headers
from layertap.files.read import Loaded

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class HiddenStatesClient:
    """The blocking client; see the module.

    Args:
        base_url: of the server, without `/v1`.
        api_key: sent with each request.
        timeout: seconds that a request may take.
        retries: how often what is safe to repeat is repeated.
        local: read files by their path where this machine can see it.
        http: an httpx.Client to use instead, with its own base_url.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        retries: int = 4,
        local: bool = True,
        http: httpx.Client | None = None,
    ) -> None:
        self._http = http or httpx.Client(base_url=base_url, headers=key_headers(api_key), timeout=timeout)
        self._protocol = Protocol(retries, self._http.timeout.read)
        self._local = local

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """`POST /v1/completions`; fields of the body as keywords. Returns the answer.

        Raises:
            ServerError: the server refused it, and says why.
        """
        return self._do(self._protocol.generate("/v1/completions", {"prompt": prompt, **body}))

    def chat(self, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
        """`POST /v1/chat/completions`, likewise."""
        return self._do(self._protocol.generate("/v1/chat/completions", {"messages": messages, **body}))

    def wait(self, handle: Handle, *, timeout: float = 300.0) -> None:
        """Wait until a file is there.

        Args:
            handle: a choice of an answer, its kv_transfer_params, or an id.
            timeout: seconds.

        Raises:
            HiddenStatesError: it will not come (the reason), is unknown (MissingError), or takes too long (WaitTimeoutError).
        """
        self._do(self._protocol.wait(handle, timeout))

    def fetch(self, handle: Handle, *, timeout: float = 300.0) -> "dict[str, torch.Tensor]":
        """Wait for a file, get it and check every byte: `hidden_states` [tokens, layers, hidden] and `token_ids` [tokens].

        Raises:
            HiddenStatesError: as `wait` and `load_hidden_states`.
        """
        return as_tensors(self.fetch_raw(handle, timeout=timeout))

    def fetch_raw(self, handle: Handle, *, timeout: float = 300.0) -> Loaded:
        """`fetch` without torch, with what the file says of itself (`.info`)."""
        return self._do(self._protocol.fetch(handle, timeout, local=self._local))

    def find(self, tag: str) -> list[dict[str, Any]]:
        """The handles of the request with a tag, each with its `state`."""
        return self._do(self._protocol.find(tag))

    def delete(self, handle: Handle) -> None:
        """Free a file; fine if it is gone already."""
        self._do(self._protocol.delete(handle))

    def models(self) -> list[dict[str, Any]]:
        """What is served."""
        return self._do(self._protocol.models())

    def update_weights(self, path: str | os.PathLike[str], version: str) -> dict[str, Any]:
        """Let the server load a checkpoint; files of later requests say `version`."""
        return self._do(self._protocol.update_weights(os.fspath(path), version))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _do(self, steps: Steps[T]) -> T:
        outcome: Any = None
        try:
            step = next(steps)
            while True:
                if isinstance(step, Sleep):
                    time.sleep(step.seconds)
                    outcome = None
                elif isinstance(step, Call):
                    try:
                        outcome = step.work()
                    except Exception as exc:  # noqa: BLE001 - raised where the steps can see it
                        step = steps.throw(exc)
                        continue
                else:
                    outcome = self._send(step)
                step = steps.send(outcome)
        except StopIteration as end:
            return cast(T, end.value)
        finally:
            steps.close()

    def _send(self, step: Send) -> httpx.Response | httpx.TransportError:
        try:
            if step.into is None:
                return self._http.request(step.method, step.path, **step.parts)
            with self._http.stream(step.method, step.path, **step.parts) as answer:
                if answer.status_code not in (200, 206):
                    answer.read()
                    return answer
                try:
                    for chunk in answer.iter_bytes(1 << 20):
                        step.into.write(chunk)
                except httpx.TransportError as exc:
                    answer.layertap_broken = exc  # type: ignore[attr-defined]
                return answer
        except httpx.TransportError as exc:
            return exc
