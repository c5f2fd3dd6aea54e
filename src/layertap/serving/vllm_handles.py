"""Handles into vLLM's answers: on each choice of a JSON answer, and on each choice's last chunk of a stream."""

import json
from typing import Any

from starlette.datastructures import Headers

from layertap.serving.answers import Handles
from layertap.serving.gate import Message, Send
from layertap.serving.sse import EventSplitter
from layertap.serving.vllm_admission import ERROR_KEY, Admitted


class AddHandles:
    """A `send` that puts handles into what passes: a JSON answer, or a stream's chunks."""

    def __init__(self, send: Send, admitted: Admitted, sayer: Handles) -> None:
        self._send = send
        self._admitted = admitted
        self._num_handles = len(admitted.handles)
        self._sayer = sayer
        self._start: Message | None = None
        self._streams = False
        self._passes = False
        self._parts: list[bytes] = []
        self._events = EventSplitter()

    @property
    def has_handles(self) -> bool:
        """Whether the answer began, and has handles."""
        return bool(self._num_handles) and not self._passes and (self._streams or self._start is not None)

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = Headers(raw=message["headers"])
            kind = headers.get("content-type", "")
            self._streams = kind.startswith("text/event-stream")
            self._passes = not self._num_handles or message["status"] != 200 or not (self._streams or "json" in kind)
            if message["status"] != 200:
                self._admitted.withdraw()
            if self._streams or self._passes:
                await self._send(message)
            else:
                self._start = message
            return
        if message["type"] != "http.response.body" or self._passes:
            await self._send(message)
        elif self._streams:
            done = not message.get("more_body", False)
            data = b"".join(self._event(event) for event in self._events.feed(message.get("body", b""), done))
            await self._send({"type": "http.response.body", "body": data, "more_body": not done})
        else:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._whole()

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {") or b'"finish_reason"' not in event:
            return event
        chunk = json.loads(event[6:])
        changed = False
        for choice in chunk.get("choices", ()):
            if choice.get("finish_reason") is not None and choice.get("index", 0) < self._num_handles:
                choice["kv_transfer_params"] = self._handle(choice.get("index", 0))
                if choice.get("index", 0) == 0:
                    chunk["kv_transfer_params"] = choice["kv_transfer_params"]
                changed = True
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n" if changed else event

    def _handle(self, index: int) -> dict[str, Any]:
        told = self._admitted.answer(index)
        return told if ERROR_KEY in told else self._sayer.say(told)

    async def _whole(self) -> None:
        assert self._start is not None
        body = b"".join(self._parts)
        answer = json.loads(body)
        if isinstance(answer, dict) and isinstance(answer.get("choices"), list):
            handles = [self._handle(index) for index in range(self._num_handles)]
            for choice, handle in zip(answer["choices"], handles, strict=False):
                choice["kv_transfer_params"] = handle
            answer["kv_transfer_params"] = handles[0]
            body = json.dumps(answer, separators=(",", ":")).encode()
        headers = [(key, value) for key, value in self._start["headers"] if key.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
