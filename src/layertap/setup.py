"""From what a user configured, in vLLM's long form or the short one, to a store and a front end."""

import difflib
import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layertap.capture.layers import DEFAULT_LAYERS, LayersLike
from layertap.capture.options import StoreOptions
from layertap.engines.base import ModelInfo
from layertap.errors import OptionError
from layertap.files.paths import check_folder
from layertap.frontend import Frontend
from layertap.params import KVTransferConfig, SamplingParams, layers_of_speculative_config

logger = logging.getLogger(__name__)

_STORE_OPTIONS = {"layers", "storage", "kv_transfer_config", "speculative_config", "weights_version"}
_ONE_PROCESS = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "runner": "auto",
    "tokenizer_mode": "auto",
    "quantization": None,
    "disable_log_stats": True,
}


class StoreConfig:
    """The store's options, from the short or the long form."""

    def __init__(self, options: StoreOptions, layers: LayersLike | None, stores: bool) -> None:
        self.options = options
        self.layers = layers
        self.stores = stores

    @classmethod
    def build(
        cls,
        layers: LayersLike | None,
        storage: str | os.PathLike[str] | None,
        speculative_config: Mapping[str, Any] | None,
        kv_transfer_config: KVTransferConfig | Mapping[str, Any] | None,
    ) -> "StoreConfig":
        stores = storage is not None or kv_transfer_config is not None
        options = StoreOptions()
        if kv_transfer_config is not None:
            options = KVTransferConfig.coerce(kv_transfer_config).store_options()
        if storage is not None:
            if kv_transfer_config is not None:
                raise OptionError(
                    "storage: give the folder once, here or as kv_connector_extra_config.shared_storage_path"
                )
            options = StoreOptions(shared_storage_path=os.path.expanduser(storage))
        if stores:
            check_folder(Path(os.path.abspath(options.shared_storage_path)), "storage")
        named = [("layers", layers), ("kv_connector_extra_config.layers", options.layers)]
        if speculative_config is not None:
            named.append(("speculative_config", layers_of_speculative_config(speculative_config)))
        given = [(name, value) for name, value in named if value is not None]
        if len({str(value) for _, value in given}) > 1:
            raise OptionError(f"layers: given twice and differently: {', '.join(f'{n}={v!r}' for n, v in given)}")
        chosen = given[0][1] if given else None
        if chosen is None and stores:
            chosen = DEFAULT_LAYERS
            logger.info("no layers were given: taking the preset %r", DEFAULT_LAYERS)
        if options.allow_custom_save_path is True:
            logger.warning(
                "allow_custom_save_path is on: requests can write to any path that this process can write to; "
                "only for trusted clients"
            )
        return cls(options, chosen, stores)


def make_frontend(
    model: str | os.PathLike[str],
    engine: str,
    config: StoreConfig,
    weights_version: str | None,
    engine_options: Mapping[str, Any],
) -> Frontend:
    """Load the embedded engine."""
    if engine == "vllm":
        raise OptionError(
            "engine: AsyncLLM runs the embedded engine; with vLLM take vLLM's own AsyncLLM, with HiddenStatesConnector as its "
            "kv_connector, or `layertap serve --engine vllm`"
        )
    if engine != "transformers":
        raise OptionError(f"engine: expected 'transformers' or 'vllm', got {engine!r}")
    if config.options.prefix_rows_bytes is not None:
        raise OptionError("prefix_rows_bytes: the embedded engine has no prefix cache; engine='vllm' has")
    if config.options.num_writer_processes is not None:
        raise OptionError("num_writer_processes: the embedded engine writes with threads; engine='vllm' has processes")
    from layertap.engines.transformers.engine import TransformersEngine

    return Frontend(
        TransformersEngine(os.fspath(model), **check_engine_options(TransformersEngine, engine_options)),
        config.options,
        stores=config.stores,
        layers=config.layers,
        weights_version=weights_version,
    )


def check_engine_options(engine: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the engine takes; vLLM's that ask for what is the case anyway are dropped.

    Raises:
        OptionError: an option that the engine doesn't know or can't honour.
    """
    known = set(inspect.signature(engine).parameters)
    taken: dict[str, Any] = {}
    for name, value in options.items():
        if name in known:
            taken[name] = value
        elif name in _ONE_PROCESS and value != _ONE_PROCESS[name]:
            raise OptionError(f"{name}: the embedded engine can't honour {value!r}; engine='vllm' can")
        elif name not in _ONE_PROCESS:
            near = difflib.get_close_matches(name, known | _STORE_OPTIONS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; engine='vllm' takes vLLM's options"
            raise OptionError(f"{name}: the embedded engine has no such option{hint}")
    return taken


def params_for_each(sampling_params: Any, count: int, info: ModelInfo) -> list[SamplingParams]:
    """One SamplingParams per prompt.

    Raises:
        OptionError: a list of another length, or a bad value.
    """
    if sampling_params is None:
        return [SamplingParams(**info.generation_defaults)] * count
    if isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str):
        if len(sampling_params) != count:
            raise OptionError(
                f"sampling_params: a list of {len(sampling_params)} for {count} prompts; give one, or one each"
            )
        return [SamplingParams.coerce(params) for params in sampling_params]
    return [SamplingParams.coerce(sampling_params)] * count
