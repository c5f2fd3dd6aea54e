"""The client for an event loop."""

import asyncio
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import httpx

from layertap.client.connections import lanes_unless_proxied
from layertap.client.protocol import Call, Handle, Protocol, Send, Sleep, Steps, as_tensors, key_headers
from layertap.files.read import Loaded

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class AsyncHiddenStatesClient:
    """The same for an event loop; arguments, answers and errors are those of HiddenStatesClient."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        retries: int = 4,
        local: bool = True,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._http = http or httpx.AsyncClient(
            base_url=base_url, headers=key_headers(api_key), timeout=timeout, transport=lanes_unless_proxied()
        )
        self._protocol = Protocol(retries, self._http.timeout.read)
        self._local = local

    async def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """See HiddenStatesClient."""
        return await self._do(self._protocol.generate("/v1/completions", {"prompt": prompt, **body}))

    async def chat(self, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
        """See HiddenStatesClient."""
        return await self._do(self._protocol.generate("/v1/chat/completions", {"messages": messages, **body}))

    async def wait(self, handle: Handle, *, timeout: float = 300.0) -> None:
        """See HiddenStatesClient."""
        await self._do(self._protocol.wait(handle, timeout))

    async def fetch(self, handle: Handle, *, timeout: float = 300.0) -> "dict[str, torch.Tensor]":
        """See HiddenStatesClient."""
        return as_tensors(await self.fetch_raw(handle, timeout=timeout))

    async def fetch_raw(self, handle: Handle, *, timeout: float = 300.0) -> Loaded:
        """See HiddenStatesClient."""
        return await self._do(self._protocol.fetch(handle, timeout, local=self._local))

    async def find(self, tag: str) -> list[dict[str, Any]]:
        """See HiddenStatesClient."""
        return await self._do(self._protocol.find(tag))

    async def delete(self, handle: Handle) -> None:
        """See HiddenStatesClient."""
        await self._do(self._protocol.delete(handle))

    async def models(self) -> list[dict[str, Any]]:
        """See HiddenStatesClient."""
        return await self._do(self._protocol.models())

    async def update_weights(self, path: str | os.PathLike[str], version: str) -> dict[str, Any]:
        """See HiddenStatesClient."""
        return await self._do(self._protocol.update_weights(os.fspath(path), version))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _do(self, steps: Steps[T]) -> T:
        outcome: Any = None
        try:
            step = next(steps)
            while True:
                if isinstance(step, Sleep):
                    await asyncio.sleep(step.seconds)
                    outcome = None
                elif isinstance(step, Call):
                    try:
                        outcome = step.work() if step.quick else await asyncio.to_thread(step.work)
                    except Exception as exc:  # noqa: BLE001 - raised where the steps can see it
                        step = steps.throw(exc)
                        continue
                else:
                    outcome = await self._send(step)
                step = steps.send(outcome)
        except StopIteration as end:
            return cast(T, end.value)
        finally:
            steps.close()

    async def _send(self, step: Send) -> httpx.Response | httpx.TransportError:
        try:
            if step.into is None:
                return await self._http.request(step.method, step.path, **step.parts)
            async with self._http.stream(step.method, step.path, **step.parts) as answer:
                if answer.status_code not in (200, 206):
                    await answer.aread()
                    return answer
                try:
                    async for chunk in answer.aiter_bytes(1 << 20):
                        if step.into.is_small:
                            step.into.write(chunk)
                        else:
                            await asyncio.to_thread(step.into.write, chunk)
                except httpx.TransportError as exc:
                    answer.layertap_broken = exc  # type: ignore[attr-defined]
                return answer
        except httpx.TransportError as exc:
            return exc
