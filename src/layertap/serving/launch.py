"""`layertap serve` without its command line: options in, a running server out."""

import contextlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from layertap.capture.layers import LayersLike
from layertap.capture.options import StoreOptions
from layertap.errors import OptionError
from layertap.params import CONNECTORS, KVTransferConfig
from layertap.serving.settings import ServerSettings

logger = logging.getLogger(__name__)

DEFAULT_TTL_SECONDS = 3600.0
DEFAULT_CONNECTOR = "HiddenStatesConnector"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What `layertap serve` was asked for.

    Attributes:
        model: folder, hub id or GGUF file.
        host, port: where to listen.
        layers: taken by default.
        store: the store's options by name, as given in their short form.
        speculative_config, kv_transfer_config: vLLM's documented forms.
        engine_options: for the engine.
        weights_version: said in each file.
        settings: of the HTTP side.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    layers: LayersLike | None = None
    store: Mapping[str, Any] = field(default_factory=dict)
    speculative_config: Mapping[str, Any] | None = None
    kv_transfer_config: Mapping[str, Any] | None = None
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    weights_version: str | None = None
    settings: ServerSettings = field(default_factory=ServerSettings)


def store_config(options: ServeOptions) -> dict[str, Any]:
    """The connector's configuration with all options in their place and the defaults of serving.

    Raises:
        OptionError: an option is unknown, bad, or given twice.
    """
    given = dict(options.kv_transfer_config or {"kv_connector": DEFAULT_CONNECTOR})
    if given.get("kv_connector") == "MultiConnector":
        raise OptionError("kv_transfer_config.kv_connector: MultiConnector needs --engine vllm")
    config = KVTransferConfig.coerce(given)
    extra = dict(config.kv_connector_extra_config)
    twice = sorted(name for name in options.store if name in extra and extra[name] != options.store[name])
    if twice:
        raise OptionError(f"{twice[0]}: given twice and differently, as an option and in kv_connector_extra_config")
    extra.update(options.store)
    if "ttl_seconds" not in extra:
        extra["ttl_seconds"] = DEFAULT_TTL_SECONDS
        logger.info("ttl_seconds was not given: files are removed %g s after they were written", DEFAULT_TTL_SECONDS)
    if options.kv_transfer_config and config.kv_connector in CONNECTORS and config.kv_role is None:
        logger.info("kv_role was not given: taking 'kv_producer'")
    return {"kv_connector": config.kv_connector, "kv_role": config.kv_role, "kv_connector_extra_config": extra}


def _engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    from layertap.engines.transformers.generate import GenerationOptions

    rest = dict(given)
    num_seqs = rest.pop("max_num_seqs", None)
    num_tokens = rest.get("max_num_batched_tokens")
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        if given.get(name) is not None and given[name] < 1:
            raise OptionError(f"{name}: expected a whole number of at least 1, got {given[name]!r}")
    if num_seqs is not None or num_tokens is not None:
        rest["generation"] = GenerationOptions(max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)
    return rest


def serve(options: ServeOptions) -> None:
    """Load the model, serve until SIGTERM or SIGINT, finish what is running.

    Raises:
        OptionError, ModelError: it can't start; nothing was served.
    """
    from layertap.llm import AsyncLLM
    from layertap.serving.app import build_app
    from layertap.serving.listening import Server, bind, run, signals_end_the_server, url_of, warn_if_open

    config = store_config(options)
    StoreOptions.parse(config["kv_connector_extra_config"])
    engine_options = _engine_options(options.engine_options)
    warn_if_open(options.host, options.settings.api_keys, "use it")
    # the engine's thread computes all the time: let the event loop in more often than every 5 ms
    sys.setswitchinterval(0.001)
    claimed = bind(options.host, options.port)
    address = url_of(options.host, claimed)
    with contextlib.closing(claimed):
        llm = AsyncLLM(
            options.model,
            layers=options.layers,
            speculative_config=options.speculative_config,
            kv_transfer_config=config,
            weights_version=options.weights_version,
            **engine_options,
        )
        with contextlib.closing(llm):
            app, state = build_app(llm.front, options.settings)
            with signals_end_the_server():
                on_ready = partial(logger.info, "serving %s at %s", state.names[0], address)
                run(Server(app, on_ready, state.is_at_rest), claimed)
                llm.close()
    logger.info("stopped; everything that was running was finished")
