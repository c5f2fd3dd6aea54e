"""What both endpoints say in the same way: usage, log probabilities, handles, chunks of a stream."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from layertap.outputs import CompletionOutput, Logprob
from layertap.serving.session import Piece, Session
from layertap.writing.shipping import said_handle

DONE = b"data: [DONE]\n\n"


def event(payload: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def usage(session: Session) -> dict[str, Any]:
    """Tokens of all prompts and all choices."""
    prompt = sum(len(request.output.prompt_token_ids) for request in session.requests)
    completion = sum(len(output.token_ids) for request in session.requests for output in request.output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def token_text(token_id: int, entry: Logprob, as_ids: bool) -> str:
    """How a token is named in log probabilities."""
    return f"token_id:{token_id}" if as_ids else (entry.decoded_token or "")


def completion_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], top: int, as_ids: bool, first_offset: int
) -> dict[str, Any]:
    """OpenAI's form for completions: parallel lists."""
    tokens, chosen, tops, offsets = [], [], [], []
    offset = first_offset
    for token_id, entries in zip(token_ids, logprobs, strict=False):
        text = token_text(token_id, entries[token_id], as_ids)
        tokens.append(text)
        chosen.append(entries[token_id].logprob)
        ranked = _ranked(entries, top, token_id)
        tops.append({token_text(other, entry, as_ids): entry.logprob for other, entry in ranked} if top else None)
        offsets.append(offset)
        offset += len(entries[token_id].decoded_token or "")
    return {"text_offset": offsets, "token_logprobs": chosen, "tokens": tokens, "top_logprobs": tops}


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]], top: int, as_ids: bool
) -> dict[str, Any]:
    """OpenAI's form for chats: a list of objects."""
    content = []
    for token_id, entries in zip(token_ids, logprobs, strict=False):
        one = _chat_entry(token_id, entries[token_id], as_ids)
        ranked = [(other, entry) for other, entry in _ranked(entries, top, None) if (entry.rank or 1) <= top]
        one["top_logprobs"] = [_chat_entry(other, entry, as_ids) for other, entry in ranked]
        content.append(one)
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, entry: Logprob, as_ids: bool) -> dict[str, Any]:
    text = entry.decoded_token or ""
    return {
        "token": token_text(token_id, entry, as_ids),
        "logprob": max(entry.logprob, -9999.0),
        "bytes": list(text.encode(errors="replace")),
    }


def _ranked(entries: dict[int, Logprob], top: int, always: int | None) -> Iterable[tuple[int, Logprob]]:
    ordered = sorted(entries.items(), key=lambda item: (item[1].rank or 1, item[0]))
    return [(token, entry) for token, entry in ordered if (entry.rank or 1) <= top or token == always]


def finish_fields(output: CompletionOutput, handles: "Handles") -> dict[str, Any]:
    """What a finished choice says."""
    return {
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "kv_transfer_params": handles.of(output),
    }


def piece_tokens(piece: Piece, wanted: bool | None) -> dict[str, Any]:
    """vLLM's `return_token_ids` in a chunk."""
    return {"token_ids": list(piece.token_ids)} if wanted else {}


class Handles:
    """Says handles to clients: where the file will be, by the server's way of handing over.

    Args:
        handover: "path", "http" or a URL.
    """

    def __init__(self, handover: str) -> None:
        self._handover = handover

    def of(self, output: CompletionOutput) -> dict[str, Any] | None:
        """A choice's handle, or None without a capture."""
        return None if output.kv_transfer_params is None else self.say(output.kv_transfer_params)

    def say(self, handle: Mapping[str, Any]) -> dict[str, Any]:
        """A handle as clients get it."""
        said = said_handle(self._handover, handle)
        if self._handover == "http":
            said["hidden_states_url"] = f"/v1/hidden_states/{said['hidden_states_id']}"
        return said
