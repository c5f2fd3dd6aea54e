"""`LLM(engine="vllm")`: the same surface as the embedded engine's, over vLLM's own `LLM`.

Everything that a request asks for is resolved here, so files, handles and errors are the embedded engine's; what reaches vLLM is a
path, layers and positions. Where no storage was given, `extract` sends the rows through a private folder.
"""

import itertools
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from layertap.capture.layers import LayersLike, resolve_layers
from layertap.capture.options import StoreOptions
from layertap.capture.request import RequestOptions
from layertap.engines.base import ModelInfo
from layertap.engines.vllm import compat
from layertap.engines.vllm.installed import require_vllm
from layertap.engines.vllm.orders import ERROR_KEY, ID_KEY, PREFILL_KEY
from layertap.engines.vllm.plugin import CONNECTOR
from layertap.engines.vllm.private import PrivateFolder
from layertap.engines.vllm.prompts import MediaPrompt, VllmPromptReader, as_vllm_takes_it
from layertap.engines.vllm.sampling import capture_options, for_each, with_capture_options
from layertap.errors import EngineError, ExtractionError, LayertapError, OptionError, TargetExistsError
from layertap.files.claims import taken_by_another
from layertap.files.paths import SUFFIX, new_request_id, safe_name, target_path
from layertap.files.read import read_file, read_header
from layertap.files.tags import reserve_tag, tag_path
from layertap.outputs import CompletionOutput, Extracted, Logprob, RequestOutput
from layertap.prompts import Prompt
from layertap.writing.sinks import Result

_IN_FLIGHT = 256
_READ_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    tokenizer: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A request with its capture resolved."""

    request_id: str
    params: Any
    handles: list[dict[str, str] | None]


class VllmFrontend:
    """See the module.

    Args:
        model: local path or hub id.
        options: the store's options.
        layers: layers that the engine takes; a request may ask for some of them. None: all.
        stores: files may be written by `generate`.
        engine_options: go to vLLM's `LLM` as they are.
    """

    def __init__(
        self,
        model: str,
        options: StoreOptions,
        *,
        layers: LayersLike | None,
        stores: bool,
        **engine_options: Any,
    ) -> None:
        require_vllm()
        compat.check_version()
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.options = options
        self._stores = stores
        self._private = PrivateFolder()
        extra = {
            field.name: getattr(options, field.name)
            for field in fields(options)
            if getattr(options, field.name) != field.default and field.name != "handover"
        }
        # this front end has checked every path before
        extra |= {
            "layers": "all" if layers is None else layers,
            "allow_custom_save_path": True,
            "capture_by_default": False,
        }
        self._llm = LLM(
            model=os.path.expanduser(model),
            kv_transfer_config=KVTransferConfig(
                kv_connector=CONNECTOR, kv_role="kv_producer", kv_connector_extra_config=extra
            ),
            **engine_options,
        )
        config = self._llm.llm_engine.vllm_config
        self.info = model_info(config)
        self._layers = resolve_layers(extra["layers"], self.info.num_layers)
        tokenizer = None if config.model_config.skip_tokenizer_init else self._llm.get_tokenizer()
        self.engine = _Tokenizer(tokenizer)
        self.prompts = VllmPromptReader(self.info, tokenizer, self._llm)
        self._run = secrets.token_hex(8)
        self._runs = itertools.count()

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: Any, *, use_tqdm: bool, lora_request: Any = None
    ) -> list[RequestOutput]:
        """Generate for checked prompts; one output each, in order.

        Args:
            prompts: checked.
            sampling_params: one for all or one each: layertap's, vLLM's own, or mappings.
            use_tqdm: show progress.
            lora_request: vLLM's LoRARequest, one for all or one each.

        Raises:
            OptionError, TargetExistsError: nothing was generated.
            EngineError: vLLM failed.
        """
        params = for_each(sampling_params, len(prompts), self.info)
        planned = [self._plan(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
        found = self._llm.generate(
            [as_vllm_takes_it(prompt) for prompt in prompts],
            [plan.params for plan in planned],
            use_tqdm=use_tqdm,
            lora_request=lora_request,
        )
        return [_output(plan, prompt, out) for plan, prompt, out in zip(planned, prompts, found, strict=True)]

    def extract(
        self,
        prompts: Iterable[Any],
        *,
        options: RequestOptions,
        storage: Path | None,
        share_prefixes: bool = False,
        lora_request: Any = None,
    ) -> Iterator[Extracted]:
        """Prefill prompts; yield results as they finish, then raise ExtractionError if some failed.

        `share_prefixes` is left to vLLM's own prefix cache, which captures read with `prefix_rows_bytes`.

        Raises:
            OptionError: a layer that this engine doesn't take.
        """
        layers = self._resolve(options.layers)
        folder = self._private.path if storage is None else storage
        run = f"extract-{self._run}-{next(self._runs)}"
        failures: list[tuple[int, str]] = []
        paths: dict[str, tuple[int, Path]] = {}
        pending = iter(enumerate(prompts))
        engine = self._llm.llm_engine
        try:
            exhausted = False
            while paths or not exhausted:
                while not exhausted and len(paths) < _IN_FLIGHT:
                    index, item = next(pending, (-1, None))
                    if index < 0:
                        exhausted = True
                        break
                    name = f"{run}-{index}"
                    path = folder / (safe_name(name) + SUFFIX)
                    try:
                        prompt = self.prompts.read(item, room=1)
                        engine.add_request(
                            name,
                            as_vllm_takes_it(prompt),
                            self._prefill_params(name, path, layers, options),
                            lora_request=lora_request,
                        )
                    except (LayertapError, OSError, ValueError) as exc:
                        failures.append((index, str(exc)))
                        continue
                    paths[name] = (index, path)
                for output in self._step():
                    if output.finished and output.request_id in paths:
                        index, path = paths.pop(output.request_id)
                        try:
                            result = self._read(path, keep=storage is not None)
                        except (LayertapError, OSError) as exc:
                            failures.append((index, str(exc)))
                            continue
                        yield Extracted(index, result)
        finally:  # also where the consumer stopped
            if paths:
                engine.abort_request(list(paths))
        if failures:
            raise ExtractionError(sorted(failures))

    def close(self) -> None:
        """End vLLM's engine."""
        engine = self._llm.llm_engine
        engine.engine_core.shutdown()
        self._private.remove()

    def _step(self) -> list[Any]:
        engine = self._llm.llm_engine
        if not engine.has_unfinished_requests():
            return []
        try:
            outputs: list[Any] = engine.step()
        except Exception as exc:
            raise EngineError(f"vLLM's engine failed: {exc}") from exc
        return outputs

    def _read(self, path: Path, *, keep: bool) -> Result:
        if keep:
            loaded = read_file(path, timeout=_READ_SECONDS)
            return Result(token_ids=loaded.token_ids, info=read_header(path).info, path=path)
        try:
            loaded = read_file(path, timeout=_READ_SECONDS)
        finally:
            for leftover in path.parent.glob(f"{path.name}*"):
                leftover.unlink(missing_ok=True)
        return Result(token_ids=loaded.token_ids, info=loaded.info, rows=loaded.rows)

    def _prefill_params(self, name: str, path: Path, layers: tuple[int, ...], options: RequestOptions) -> Any:
        from vllm import SamplingParams as VllmSamplingParams

        wanted: dict[str, Any] = {
            "capture": True,
            "hidden_states_path": str(path),
            "layers": list(layers),
            "overwrite": options.overwrite,
            ID_KEY: name,
            PREFILL_KEY: True,
        }
        if options.positions is not None:
            positions = options.positions
            wanted["positions"] = positions if isinstance(positions, str) else list(positions)
        save_dtype = options.save_dtype or self.options.save_dtype
        if save_dtype is not None:
            wanted["save_dtype"] = save_dtype
        return VllmSamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, extra_args={"kv_transfer_params": wanted}
        )

    def _resolve(self, layers: LayersLike | None) -> tuple[int, ...]:
        wanted = self._layers if layers is None else resolve_layers(layers, self.info.num_layers)
        missing = [layer for layer in wanted if layer not in self._layers]
        if missing:
            raise OptionError(
                f"layers: {missing} aren't taken by this engine, which was started with {list(self._layers)}; vLLM's layers "
                "are fixed at the start"
            )
        return wanted

    def _plan(self, prompt: Prompt, params: Any) -> _Planned:
        request_id = new_request_id("cmpl")
        given = capture_options(params)
        options = self.options.capture_of(given, stores=self._stores)
        if options is None:
            plain = with_capture_options(params, {"capture": False})
            return _Planned(request_id=request_id, params=plain, handles=[None] * params.n)
        base = target_path(self.options, request_id, options.hidden_states_path)
        suffixes = ["", *(f"-0-{choice}" for choice in range(1, params.n))]
        stem = base.name.removesuffix(SUFFIX)
        paths = [base, *(base.with_name(f"{stem}{suffix}{SUFFIX}") for suffix in suffixes[1:])]
        if not options.overwrite:
            for path in paths:
                if os.path.lexists(path):
                    raise TargetExistsError(f"{path} exists already; `overwrite` would replace it")
        handles = [
            {"hidden_states_path": str(path), "hidden_states_id": f"{request_id}{suffix}"}
            for path, suffix in zip(paths, suffixes, strict=True)
        ]
        if not isinstance(prompt, MediaPrompt):  # its length is known only inside vLLM, where it is checked
            limit = self.info.max_model_len - len(prompt.token_ids)
            options.window.admit(
                len(prompt.token_ids), limit if params.max_tokens is None else min(params.max_tokens, limit)
            )
        if options.tag is not None:
            if tag_path(self.options.shared_storage_path, options.tag).exists():
                raise OptionError(
                    f"kv_transfer_params.tag: {options.tag!r} is taken by an earlier request; tags are used once"
                )
            reserve_tag(self.options.shared_storage_path, options.tag, request_id, handles)
        wanted = dict(given or {})
        wanted.pop("tag", None)
        wanted |= {
            "capture": True,
            "layers": list(self._resolve(options.layers)),
            "hidden_states_path": str(base),
            ID_KEY: request_id,
        }
        if options.save_dtype is None and self.options.save_dtype is not None:
            wanted["save_dtype"] = self.options.save_dtype
        return _Planned(request_id=request_id, params=with_capture_options(params, wanted), handles=list(handles))


def model_info(config: Any) -> ModelInfo:
    """The facts of the model that vLLM loaded."""
    model = config.model_config
    eos = getattr(model.hf_text_config, "eos_token_id", None)
    return ModelInfo(
        model=str(model.model),
        revision=model.revision,
        num_layers=compat.num_layers(config),
        hidden_size=compat.hidden_size(config),
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        dtype=compat.dtype_name(model.dtype),
        device=str(config.device_config.device_type),
        engine="vllm",
        engine_version=compat.version(),
        quantization=model.quantization,
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),),
        generation_defaults=dict(model.get_diff_sampling_param()),
    )


def _output(plan: _Planned, prompt: Prompt, found: Any) -> RequestOutput:
    handles = [_checked(handle, plan.params) for handle in plan.handles]
    choices = [
        CompletionOutput(
            index=choice.index,
            text=choice.text,
            token_ids=list(choice.token_ids),
            cumulative_logprob=choice.cumulative_logprob,
            logprobs=_logprobs(choice.logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            kv_transfer_params=handles[choice.index],
        )
        for choice in found.outputs
    ]
    return RequestOutput(
        request_id=plan.request_id,
        prompt=prompt.text,
        prompt_token_ids=list(found.prompt_token_ids) if isinstance(prompt, MediaPrompt) else prompt.token_ids,
        prompt_logprobs=_logprobs(found.prompt_logprobs),
        outputs=choices,
        finished=found.finished,
        num_cached_tokens=found.num_cached_tokens,
        kv_transfer_params=handles[0],
    )


def _checked(told: dict[str, Any] | None, params: Any) -> dict[str, Any] | None:
    """A handle, or why the file at its path is another's: it came into being between our check and the reservation."""
    if told is None:
        return None
    overwrite = params.extra_args["kv_transfer_params"].get("overwrite") is True
    taken = taken_by_another(Path(told["hidden_states_path"]), told["hidden_states_id"], overwrite=overwrite)
    return told if taken is None else {ERROR_KEY: taken}


def _logprobs(entries: Any) -> Any:
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {token: Logprob(one.logprob, one.rank, one.decoded_token) for token, one in entry.items()}
        for entry in entries
    ]
