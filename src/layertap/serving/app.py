"""The app: routes of the OpenAI API over one engine. `build_app` makes it, `server.py` runs it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from layertap import __version__
from layertap.frontend import Frontend
from layertap.params import SamplingParams
from layertap.prompts import Prompt
from layertap.serving import answers, chat, completions
from layertap.serving.api_errors import ApiError, from_exception
from layertap.serving.error_handlers import add_error_handlers
from layertap.serving.file_routes import file_routes
from layertap.serving.gate import CLIENT_CLOSED, Gate
from layertap.serving.identity import Caller, new_id
from layertap.serving.page import page_routes
from layertap.serving.sampling import chat_params, completion_params
from layertap.serving.schemas import ChatBody, CompletionBody
from layertap.serving.session import Session, open_session
from layertap.serving.settings import ServerSettings
from layertap.serving.state import ServerState
from layertap.serving.weights import weights_routes

logger = logging.getLogger(__name__)


def build_app(front: Frontend, settings: ServerSettings | None = None) -> tuple[Gate, ServerState]:
    """Make the ASGI app of an engine.

    Args:
        front: `AsyncLLM(...).front`; it isn't closed by the app.
        settings: of the HTTP side.

    Returns:
        The app, and what its routes share.
    """
    state = ServerState(front, settings or ServerSettings())
    app = FastAPI(title="layertap", version=__version__, lifespan=_lifespan(state))
    app.state.server = state
    add_error_handlers(app)
    _add_routes(app, state)
    app.include_router(page_routes(state))
    app.include_router(weights_routes(state))
    app.include_router(file_routes(state.desk, allow_delete=state.settings.allow_delete))
    return Gate(app, state.keys, state.settings.max_body_bytes, state.metrics), state


def _lifespan(state: ServerState) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(state.start)
        try:
            yield
        finally:
            await asyncio.to_thread(state.stop)

    return lifespan


def _add_routes(app: FastAPI, state: ServerState) -> None:
    answer = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    responses: dict[int | str, dict[str, Any]] = {200: {"description": "The answer, or its chunks.", "content": answer}}
    responses |= {
        status: {"description": text}
        for status, text in (
            (400, "A field is wrong; `error.param` names it."),
            (401, "No API key, or a wrong one."),
            (404, "No such model."),
            (409, "The file exists."),
            (413, "The body is too large."),
            (429, "Too many requests."),
            (499, "The client went away."),
            (507, "The store is full; nothing was generated."),
        )
    }

    @app.get("/health", summary="200 once requests are answered")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ready"} if state.ready else {"status": "starting"}, 200 if state.ready else 503)

    @app.get("/v1/models", summary="The models that are served", responses={401: responses[401]})
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [_model(state, name) for name in state.names]})

    @app.get("/v1/models/{name:path}", summary="One model", responses={401: responses[401], 404: responses[404]})
    async def model(name: str) -> JSONResponse:
        return JSONResponse(_model(state, state.model_name(name)))

    text = {"description": "Prometheus' form.", "content": {"text/plain": {"schema": {"type": "string"}}}}

    @app.get(
        "/metrics", summary="Prometheus metrics", response_class=Response, responses={200: text, 401: responses[401]}
    )
    async def metrics() -> Response:
        exposed = await asyncio.to_thread(state.metrics.text)
        return Response(exposed, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/v1/completions", summary="Complete prompts", responses=responses)
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        call = _Call(state, request, "cmpl", body.model, body.request_id)
        params = call.checked(lambda: completion_params(body, state.front.info, state.settings.max_logprobs))
        prompts = _prompt_list(body.prompt)
        head = completions.head(call.request_id, call.created, call.model)

        def read() -> list[Prompt]:
            return [_read_prompt(state, item, place, len(prompts)) for place, item in enumerate(prompts)]

        session = await call.open(read, len(prompts), params, bool(body.stream))
        if body.stream:
            return call.streamed(session, completions.stream(body, session, head, state.handles))
        return await call.whole(session, lambda: completions.answer(body, session, head, state.handles))

    @app.post("/v1/chat/completions", summary="Answer a conversation", responses=responses)
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        call = _Call(state, request, "chatcmpl", body.model, body.request_id)
        params = call.checked(lambda: chat_params(body, state.front.info, state.settings.max_logprobs))
        head = chat.head(call.request_id, call.created, call.model, bool(body.stream))

        def read() -> list[Prompt]:
            return [
                state.front.prompts.chat(
                    body.messages,
                    tools=None if body.tool_choice == "none" else body.tools,
                    add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
                    continue_final_message=body.continue_final_message,
                    chat_template_kwargs=body.chat_template_kwargs,
                )
            ]

        session = await call.open(read, 1, params, bool(body.stream))
        if body.stream:
            return call.streamed(session, chat.stream(body, session, head, state.handles))
        return await call.whole(session, lambda: chat.answer(body, session, head, state.handles))


class _Call:
    """One call of a generating endpoint, from the checked body to its answer."""

    def __init__(
        self, state: ServerState, request: Request, kind: str, model: str | None, client_id: str | None
    ) -> None:
        self.model = state.model_name(model)
        self.created = int(time.time())
        self._state = state
        self._request = request
        self._caller: Caller = request.state.caller
        self.request_id = new_id(kind, self._caller, client_id or request.headers.get("x-request-id"))
        self._headers = {"x-request-id": self.request_id}
        self._num_sequences = 0
        self._own_path = False

    def checked(self, make: Callable[[], SamplingParams]) -> SamplingParams:
        """The sampling parameters, with errors as answers."""
        try:
            params = make()
        except ValueError as exc:
            raise from_exception(exc) from exc
        self._own_path = bool((params.kv_transfer_params or {}).get("hidden_states_path"))
        return params

    async def open(
        self, read: Callable[[], Sequence[Prompt]], num_prompts: int, params: SamplingParams, streaming: bool
    ) -> Session:
        """Admit the request."""
        state = self._state
        num_sequences = num_prompts * params.n
        await state.take_in(num_sequences)
        self._num_sequences = num_sequences
        try:
            return await open_session(
                state.front,
                state.admission,
                read,
                params,
                request_id=self.request_id,
                caller=self._caller,
                every_token=streaming,
                on_admitted=state.admitted,
            )
        except BaseException as exc:
            state.let_out(num_sequences)
            if isinstance(exc, ValueError | OSError | RuntimeError) or type(exc).__module__ == "layertap.errors":
                raise from_exception(exc, path_is_the_clients=self._own_path) from exc
            raise

    def _end(self, session: Session) -> None:
        session.close()
        usage = answers.usage(session)
        self._state.metrics.generated(usage["prompt_tokens"], usage["completion_tokens"])
        self._state.let_out(self._num_sequences)

    async def whole(self, session: Session, answer: Callable[[], dict[str, Any]]) -> Response:
        """Wait for the end, or for the client to go away."""
        ended = asyncio.create_task(session.wait())
        gone = asyncio.create_task(self._gone())
        try:
            await asyncio.wait({ended, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                return Response(status_code=CLIENT_CLOSED)
            await ended
            return JSONResponse(answer(), headers=self._headers)
        except Exception as exc:
            raise from_exception(exc) from exc
        finally:
            for task in (ended, gone):
                task.cancel()
            self._end(session)

    async def _gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass

    def streamed(self, session: Session, chunks: AsyncIterator[dict[str, Any]]) -> Response:
        """Send chunks as they come."""

        async def events() -> AsyncIterator[bytes]:
            try:
                async for chunk in chunks:
                    yield answers.event(chunk)
            except Exception as exc:
                error = from_exception(exc)
                if error.code == "internal_error":
                    logger.exception("request %s failed", self.request_id)
                yield answers.event(error.body())
            yield answers.DONE

        return _Events(events(), lambda: self._end(session), self._headers)


class _Events(StreamingResponse):
    """A stream whose request is ended in every case, also when it never began to be sent."""

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={**headers, "cache-control": "no-cache"})
        self._end = end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def _model(state: ServerState, name: str) -> dict[str, Any]:
    info = state.front.info
    return {
        "id": name,
        "object": "model",
        "created": int(state.started),
        "owned_by": "layertap",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_model_len,
    }


def _prompt_list(prompt: Any) -> list[Any]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _read_prompt(state: ServerState, item: Any, place: int, count: int) -> Prompt:
    try:
        return state.front.prompts.read(item, room=1)
    except ValueError as exc:
        where = f"prompt[{place}]" if count > 1 else "prompt"
        text = str(exc).removeprefix("prompt: ")
        raise ApiError(400, f"{where}: {text}", param=where, code="invalid_value") from exc
