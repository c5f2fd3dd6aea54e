"""`/v1/completions`: answers and chunks."""

from collections.abc import AsyncIterator
from typing import Any

from layertap.serving import answers
from layertap.serving.answers import Handles
from layertap.serving.schemas import CompletionBody
from layertap.serving.session import Piece, Session


def head(request_id: str, created: int, model: str) -> dict[str, Any]:
    """The fields that every answer and chunk has."""
    return {
        "id": request_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "system_fingerprint": None,
    }


def answer(body: CompletionBody, session: Session, head: dict[str, Any], handles: Handles) -> dict[str, Any]:
    """The whole answer: prompts in order, each with its choices."""
    choices: list[dict[str, Any]] = []
    for request in session.requests:
        echo = (request.output.prompt or "") if body.echo else ""
        for output in request.output.outputs:
            choice = {"index": len(choices), "text": echo + output.text, "logprobs": None}
            if body.logprobs is not None:
                choice["logprobs"] = answers.completion_logprobs(
                    output.token_ids, output.logprobs or [], body.logprobs, bool(body.return_tokens_as_token_ids), 0
                )
            choice |= answers.finish_fields(output, handles)
            if body.return_token_ids:
                choice["token_ids"] = list(output.token_ids)
                choice["prompt_token_ids"] = list(request.output.prompt_token_ids)
            choices.append(choice)
    return {
        **head,
        "choices": choices,
        "usage": answers.usage(session),
        "kv_transfer_params": choices[0]["kv_transfer_params"],
    }


async def stream(
    body: CompletionBody, session: Session, head: dict[str, Any], handles: Handles
) -> AsyncIterator[dict[str, Any]]:
    """The chunks, the one with the usage last if it was asked for."""
    offsets: dict[tuple[int, int], int] = {}
    options = body.stream_options
    async for news in session.pieces():
        for piece in news:
            chunk = {**head, "choices": [_choice(body, session, piece, offsets, handles)]}
            if piece.ends and piece.place == piece.choice == 0:
                chunk["kv_transfer_params"] = handles.of(piece.output)
            if options is not None and options.continuous_usage_stats:
                chunk["usage"] = answers.usage(session)
            yield chunk
    if options is not None and options.include_usage:
        yield {**head, "choices": [], "usage": answers.usage(session)}


def _choice(
    body: CompletionBody, session: Session, piece: Piece, offsets: dict[tuple[int, int], int], handles: Handles
) -> dict[str, Any]:
    request = session.requests[piece.place]
    key = (piece.place, piece.choice)
    first = key not in offsets
    offset = offsets.setdefault(key, 0)
    echo = (request.output.prompt or "") if body.echo and first else ""
    index = piece.place * request.params.n + piece.choice
    choice: dict[str, Any] = {"index": index, "text": echo + piece.text, "logprobs": None, "finish_reason": None}
    if body.logprobs is not None:
        choice["logprobs"] = answers.completion_logprobs(
            piece.token_ids, piece.logprobs, body.logprobs, bool(body.return_tokens_as_token_ids), offset
        )
        taken = zip(piece.token_ids, piece.logprobs, strict=False)
        offsets[key] += sum(len(entries[token].decoded_token or "") for token, entries in taken)
    choice |= answers.piece_tokens(piece, body.return_token_ids)
    if body.return_token_ids and first:
        choice["prompt_token_ids"] = list(request.output.prompt_token_ids)
    if piece.ends:
        choice |= answers.finish_fields(piece.output, handles)
    return choice
