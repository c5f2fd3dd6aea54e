"""`/v1/chat/completions`: answers and chunks."""

from collections.abc import AsyncIterator
from typing import Any

from layertap.serving import answers
from layertap.serving.answers import Handles
from layertap.serving.schemas import ChatBody
from layertap.serving.session import Piece, Session


def head(request_id: str, created: int, model: str, streaming: bool) -> dict[str, Any]:
    """The fields that every answer and chunk has."""
    kind = "chat.completion.chunk" if streaming else "chat.completion"
    return {"id": request_id, "object": kind, "created": created, "model": model, "system_fingerprint": None}


def answer(body: ChatBody, session: Session, head: dict[str, Any], handles: Handles) -> dict[str, Any]:
    """The whole answer."""
    (request,) = session.requests
    choices = []
    for output in request.output.outputs:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        choice: dict[str, Any] = {"index": output.index, "message": message, "logprobs": None}
        if body.logprobs:
            choice["logprobs"] = answers.chat_logprobs(
                output.token_ids, output.logprobs or [], body.top_logprobs or 0, bool(body.return_tokens_as_token_ids)
            )
        choice |= answers.finish_fields(output, handles)
        if body.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        choices.append(choice)
    whole = {
        **head,
        "choices": choices,
        "usage": answers.usage(session),
        "kv_transfer_params": choices[0]["kv_transfer_params"],
    }
    if body.return_token_ids:
        whole["prompt_token_ids"] = list(request.output.prompt_token_ids)
    return whole


async def stream(
    body: ChatBody, session: Session, head: dict[str, Any], handles: Handles
) -> AsyncIterator[dict[str, Any]]:
    """The chunks: the roles first, the one with the usage last if it was asked for."""
    (request,) = session.requests
    options = body.stream_options
    for output in request.output.outputs:
        delta = {"role": "assistant", "content": ""}
        first = {**head, "choices": [{"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None}]}
        if body.return_token_ids:
            first["prompt_token_ids"] = list(request.output.prompt_token_ids)
        yield first
    async for news in session.pieces():
        for piece in news:
            chunk = {**head, "choices": [_choice(body, piece, handles)]}
            if piece.ends and piece.choice == 0:
                chunk["kv_transfer_params"] = handles.of(piece.output)
            if options is not None and options.continuous_usage_stats:
                chunk["usage"] = answers.usage(session)
            yield chunk
    if options is not None and options.include_usage:
        yield {**head, "choices": [], "usage": answers.usage(session)}


def _choice(body: ChatBody, piece: Piece, handles: Handles) -> dict[str, Any]:
    delta = {"content": piece.text} if piece.text else {}
    choice: dict[str, Any] = {"index": piece.choice, "delta": delta, "logprobs": None, "finish_reason": None}
    if body.logprobs:
        choice["logprobs"] = answers.chat_logprobs(
            piece.token_ids, piece.logprobs, body.top_logprobs or 0, bool(body.return_tokens_as_token_ids)
        )
    choice |= answers.piece_tokens(piece, body.return_token_ids)
    if piece.ends:
        choice |= answers.finish_fields(piece.output, handles)
    return choice
