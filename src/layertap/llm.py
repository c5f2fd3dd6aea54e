"""`LLM` and `AsyncLLM`: the front doors, drop-in for vLLM's where its documented hidden-state extraction is concerned."""

import asyncio
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from layertap.capture.layers import LayersLike
from layertap.capture.request import Positions, RequestOptions
from layertap.engines.base import ModelInfo
from layertap.errors import OptionError, PromptError
from layertap.files.paths import check_folder
from layertap.frontend import Frontend, Request
from layertap.outputs import Extracted, RequestOutput
from layertap.params import EXTRACTION, KVTransferConfig, SamplingParams
from layertap.prompts import Prompt, as_prompt_list
from layertap.setup import StoreConfig, make_frontend, params_for_each

_MAX_RUNNING_SEQUENCES = 256


class LLM:
    """A model whose hidden states can be taken.

    The long form is vLLM's documented one, the short form ours:

        llm = LLM("Qwen/Qwen3-8B", layers="eagle3", storage="states")
        for sample in llm.extract(["a prompt", "another"], layers=[2, 18, 33]):
            print(sample.hidden_states.shape)  # [tokens, layers, hidden]

    Args:
        model: local path, hub id or GGUF file.
        engine: "transformers" (in this process) or "vllm".
        layers: layer ids or a preset to take by default.
        storage: folder for the files of `generate`; without it (and without kv_transfer_config) generate captures nothing.
        speculative_config: vLLM's documented form; the layer ids are read from it.
        kv_transfer_config: KVTransferConfig or a dict; its extra config holds the store's options.
        weights_version: said in each file's metadata.
        engine_options: everything else goes to the engine: dtype, device, revision, trust_remote_code, max_model_len, ...

    Raises:
        OptionError: an option that the engine can't honour; the message names it.
        ModelError: the model can't be loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        engine: str = "transformers",
        layers: LayersLike | None = None,
        storage: str | os.PathLike[str] | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        kv_transfer_config: KVTransferConfig | Mapping[str, Any] | None = None,
        weights_version: str | None = None,
        **engine_options: Any,
    ) -> None:
        if (
            engine == "vllm"
            and isinstance(speculative_config, Mapping)
            and speculative_config.get("method") != EXTRACTION
        ):
            engine_options["speculative_config"], speculative_config = speculative_config, None  # real speculation
        config = StoreConfig.build(layers, storage, speculative_config, kv_transfer_config)
        self._front: Any
        if engine == "vllm":
            if weights_version is not None:
                raise OptionError("weights_version: can't be said with engine='vllm'")
            from layertap.engines.vllm.engine import VllmFrontend

            self._front = VllmFrontend(
                os.fspath(model), config.options, layers=config.layers, stores=config.stores, **engine_options
            )
            return
        self._front = make_frontend(model, engine, config, weights_version, engine_options)

    @property
    def info(self) -> ModelInfo:
        """The facts of the loaded model."""
        info: ModelInfo = self._front.info
        return info

    def get_tokenizer(self) -> Any:
        """The model's tokenizer (of transformers), or None."""
        return self._front.engine.tokenizer

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Generate, and save hidden states as `extra_args={"kv_transfer_params": {...}}` and the LLM's options say.

        Args:
            prompts: text, token ids, `{"prompt": ...}`, `{"prompt_token_ids": [...]}`, or a list of them; with vLLM also
                `{"prompt": ..., "multi_modal_data": {...}}`.
            sampling_params: one for all prompts, or one each; None takes the model's generation config.
            use_tqdm: show progress on a terminal.
            lora_request: with vLLM, its LoRARequest: one for all prompts, or one each.

        Returns:
            One RequestOutput per prompt, in their order.

        Raises:
            PromptError, OptionError, TargetExistsError, StoreFullError: nothing was generated.
            EngineError: the engine failed.
        """
        items = as_prompt_list(prompts)
        checked = [self._read(item, place) for place, item in enumerate(items)]
        return self._generate(checked, sampling_params, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Mapping[str, Any] | Sequence[Any] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Generate an answer to a conversation, or to each of a list of them, with the model's chat template.

        Args:
            messages: one list of messages, or a list of such lists.
            sampling_params: as in `generate`.
            use_tqdm: show progress on a terminal.
            chat_template: another template than the model's.
            add_generation_prompt: let the assistant's turn begin.
            continue_final_message: go on inside the last message.
            tools: OpenAI's tool descriptions.
            chat_template_kwargs: more variables for the template.
            lora_request: as in `generate`.

        Raises:
            As `generate`.
        """
        if isinstance(messages, str):
            raise PromptError("messages: expected dicts with 'role' and 'content', got text; generate() takes text")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [
            self._front.prompts.chat(
                conversation,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._generate(prompts, sampling_params, use_tqdm, lora_request)

    def extract(
        self,
        prompts: Any,
        *,
        layers: LayersLike | None = None,
        storage: str | os.PathLike[str] | None = None,
        positions: Positions | None = None,
        save_dtype: str | None = None,
        overwrite: bool = False,
        share_prefixes: bool = False,
        lora_request: Any = None,
    ) -> Generator[Extracted, None, None]:
        """Take the hidden states of prompts: prefill only, nothing is generated, no block past the deepest layer is run.

        Args:
            prompts: as in `generate`; also an iterator, which is read as the results are taken.
            layers: layer ids or a preset; default the LLM's.
            storage: a folder for one file per prompt; without it the rows come back in memory.
            positions: "last" or [a, b]: only these rows.
            save_dtype: dtype of the rows; default the compute dtype.
            overwrite: replace existing files.
            share_prefixes: compute what neighbours have in common at their beginning once, where the model allows it.
            lora_request: with vLLM, its LoRARequest.

        Yields:
            Extracted, as they finish: hidden_states [tokens, layers, hidden], token_ids, layers, index.

        Raises:
            OptionError: at once, before anything runs.
            ModelError: with the first prompt: the weights can't be loaded, or the model's rows can't be taken.
            ExtractionError: after all others were yielded: which prompts failed, and why.
        """
        given = {"layers": layers, "positions": positions, "save_dtype": save_dtype, "overwrite": overwrite}
        options = RequestOptions.parse({name: value for name, value in given.items() if value is not None})
        if options.positions == "output":
            raise OptionError("positions: 'output' has no meaning in extract, which generates nothing")
        items: Iterable[Any] = prompts if isinstance(prompts, Iterator) else as_prompt_list(prompts)
        folder = None if storage is None else Path(os.path.abspath(os.path.expanduser(storage)))
        if folder is not None:
            check_folder(folder, "storage")
        more: dict[str, Any] = {"share_prefixes": share_prefixes}
        more |= {} if lora_request is None else {"lora_request": self._lora(lora_request)}
        results: Generator[Extracted, None, None] = self._front.extract(items, options=options, storage=folder, **more)
        return results

    def close(self) -> None:
        """End the engine; files that were finished are published. Running generations end with an error."""
        self._front.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self, item: Any, place: int) -> Prompt:
        try:
            prompt: Prompt = self._front.prompts.read(item, room=1)
        except ValueError as exc:
            raise type(exc)(f"prompt {place}: {exc}") from exc
        return prompt

    def _lora(self, lora_request: Any) -> Any:
        if lora_request is not None and isinstance(self._front, Frontend):
            raise OptionError(
                "lora_request: the embedded engine takes no adapters; merge the adapter into the weights, or use engine='vllm'"
            )
        return lora_request

    def _generate(
        self, prompts: Sequence[Prompt], sampling_params: Any, use_tqdm: bool, lora_request: Any
    ) -> list[RequestOutput]:
        lora = self._lora(lora_request)
        if not isinstance(self._front, Frontend):
            found: list[RequestOutput] = self._front.generate(
                prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora
            )
            return found
        params = params_for_each(sampling_params, len(prompts), self.info)
        ended: queue.SimpleQueue[Request] = queue.SimpleQueue()

        def on_update(request: Request) -> None:
            if request.output.finished:
                ended.put(request)

        requests: list[Request] = []
        running = 0
        try:
            with _Progress(len(prompts), use_tqdm) as advance:
                for prompt, param in zip(prompts, params, strict=True):
                    # each captured sequence holds two open files until it is published
                    while running and running + param.n > _MAX_RUNNING_SEQUENCES:
                        running -= len(ended.get().job_ids)
                        advance()
                    requests.append(self._front.start(prompt, param, on_update))
                    running += param.n
                while running:
                    running -= len(ended.get().job_ids)
                    advance()
        except BaseException:  # also Ctrl-C: nothing of this call may go on running
            for request in requests:
                self._front.abort(request.output.request_id)
            raise
        return [request.result() for request in requests]


class AsyncLLM:
    """The same, for an event loop. Only the embedded engine: vLLM has its own AsyncLLM, into which the plugin hooks."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        engine: str = "transformers",
        layers: LayersLike | None = None,
        storage: str | os.PathLike[str] | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        kv_transfer_config: KVTransferConfig | Mapping[str, Any] | None = None,
        weights_version: str | None = None,
        **engine_options: Any,
    ) -> None:
        config = StoreConfig.build(layers, storage, speculative_config, kv_transfer_config)
        self._front = make_frontend(model, engine, config, weights_version, engine_options)

    @property
    def info(self) -> ModelInfo:
        """The facts of the loaded model."""
        return self._front.info

    @property
    def front(self) -> Frontend:
        """The core, for servers: prompts, options, recorder."""
        return self._front

    def get_tokenizer(self) -> Any:
        """The model's tokenizer (of transformers), or None."""
        return self._front.engine.tokenizer

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Generate for one prompt; yields the output as it grows, the last one `finished`.

        Leaving the iterator early (break, cancellation, a disconnected client) aborts the request.

        Args:
            prompt: as in `LLM.generate`, one.
            sampling_params: None takes the model's generation config.
            request_id: names the request and its file; made if None.

        Raises:
            As `LLM.generate`.
        """
        loop = asyncio.get_running_loop()
        updated = asyncio.Event()
        checked = self._front.prompts.read(prompt, room=1)
        (params,) = params_for_each(sampling_params, 1, self.info)

        def on_update(request: Request) -> None:
            try:
                loop.call_soon_threadsafe(updated.set)
            except RuntimeError:  # the loop is closed: nobody listens any more
                self._front.abort(request.output.request_id)

        request = await _started(self._front, checked, params, on_update, request_id)
        try:
            while True:
                await updated.wait()
                updated.clear()
                with request.lock:
                    output = request.output.snapshot()
                if output.finished:
                    request.result()
                yield output
                if output.finished:
                    return
        finally:
            if not request.output.finished:
                self._front.abort(request.output.request_id)

    async def extract(
        self,
        prompts: Any,
        *,
        layers: LayersLike | None = None,
        storage: str | os.PathLike[str] | None = None,
        positions: Positions | None = None,
        save_dtype: str | None = None,
        overwrite: bool = False,
    ) -> AsyncIterator[Extracted]:
        """`LLM.extract` without blocking the event loop; leaving it early stops the engine."""
        results = LLM.extract(
            self,  # type: ignore[arg-type]  # it needs nothing but the core, which both have
            prompts,
            layers=layers,
            storage=storage,
            positions=positions,
            save_dtype=save_dtype,
            overwrite=overwrite,
        )
        turn = threading.Lock()  # a cancelled consumer leaves while the next result is still being computed

        def pull() -> Extracted | None:
            with turn:
                return next(results, None)

        def stop() -> None:
            with turn:
                results.close()

        try:
            while (sample := await asyncio.to_thread(pull)) is not None:
                yield sample
        finally:
            await asyncio.shield(asyncio.to_thread(stop))

    async def abort(self, request_id: str) -> None:
        """End a running request; its reader is told."""
        await asyncio.to_thread(self._front.abort, request_id)

    def close(self) -> None:
        """End the engine; running requests end with an error."""
        self._front.close()


async def _started(
    front: Frontend,
    prompt: Prompt,
    params: SamplingParams,
    on_update: Callable[[Request], None],
    request_id: str | None,
) -> Request:
    """Start a request on a thread (it may wait for disk or room); one whose consumer has left meanwhile is aborted."""
    lock = threading.Lock()
    started: list[Request] = []
    left = False

    def start() -> Request:
        request = front.start(prompt, params, on_update, request_id)
        with lock:
            started.append(request)
            unwanted = left
        if unwanted:
            front.abort(request.output.request_id)
        return request

    try:
        return await asyncio.to_thread(start)
    except asyncio.CancelledError:
        with lock:
            left = True
        for request in started:
            front.abort(request.output.request_id)
        raise


class _Progress:
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int, wanted: bool) -> None:
        self._total = total
        self._wanted = wanted
        self._bar: Any = None

    def __enter__(self) -> Any:
        if self._wanted:
            from rich.console import Console

            if Console(stderr=True).is_terminal:
                from rich.progress import Progress

                self._bar = Progress(console=Console(stderr=True), transient=True)
                self._bar.start()
                task = self._bar.add_task("generating", total=self._total)
                return lambda: self._bar.advance(task)
        return lambda: None

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
