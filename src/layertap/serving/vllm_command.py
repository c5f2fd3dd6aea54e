"""`layertap serve --engine vllm`: stock `vllm serve` with our connector and our middleware."""

import json
import logging
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from layertap.capture.options import StoreOptions
from layertap.engines.vllm.installed import require_vllm
from layertap.errors import OptionError
from layertap.params import CONNECTORS, layers_of_speculative_config
from layertap.serving.launch import ServeOptions, store_config
from layertap.serving.listening import warn_if_open
from layertap.serving.settings import VLLM_KEY_ENV, ServerSettings
from layertap.serving.vllm_admission import FRONT_ENV
from layertap.serving.vllm_middleware import CONFIG_ENV, MiddlewareConfig
from layertap.writing.shipping import is_object_store, open_store

logger = logging.getLogger(__name__)

MIDDLEWARE = "layertap.serving.vllm_middleware.HiddenStatesMiddleware"
_SHUTDOWN, _SHUTDOWN_SECONDS = "--shutdown-timeout", 3600
"""vLLM's own default is to abort what runs when it gets a SIGTERM."""
_FLAGS = {
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "revision": "--revision",
    "tokenizer": "--tokenizer",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_seqs": "--max-num-seqs",
}


def vllm_command(options: ServeOptions, more: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """The command line of vLLM and what its environment has to say to the middleware.

    Args:
        options: as for the embedded engine.
        more: options of vLLM, as they are.

    API keys are the middleware's business, on every route, and go through the environment: a command line is everybody's to read.

    Raises:
        OptionError: what can't be had with vLLM.
    """
    given = dict(options.engine_options)
    if given.pop("device", None) is not None:
        raise OptionError("device: vLLM chooses by CUDA_VISIBLE_DEVICES and its own options")
    if options.weights_version is not None:
        raise OptionError("weights_version: can't be said with --engine vllm")
    settings = options.settings
    if settings.allow_weight_updates:
        raise OptionError("allow_weight_updates: with --engine vllm weights are exchanged by vLLM's own routes")
    if settings.max_running != ServerSettings().max_running:
        raise OptionError("max_running: vLLM queues requests itself; its --max-num-seqs says how many run at once")
    speculative = options.speculative_config
    layers = options.layers
    if speculative is not None and speculative.get("method") == "extract_hidden_states":
        named = layers_of_speculative_config(speculative)
        if named is not None and layers is not None and str(named) != str(layers):
            raise OptionError("layers: given twice and differently, as an option and in speculative_config")
        layers = layers if named is None else named
        speculative = None
    config, asked = _kv_transfer_config(options, layers)
    command = [sys.executable, "-m", "layertap.serving.vllm_main", "serve", options.model]
    command += ["--host", options.host, "--port", str(options.port)]
    command += ["--kv-transfer-config", json.dumps(config), "--middleware", MIDDLEWARE]
    if speculative is not None:
        command += ["--speculative-config", json.dumps(dict(speculative))]
    for name, flag in _FLAGS.items():
        if name in given:
            command += [flag, str(given.pop(name))]
    if given.pop("trust_remote_code", False):
        command.append("--trust-remote-code")
    spot_check = _spot_check(given.pop("spot_check", 0), asked)
    if given:
        raise OptionError(f"{sorted(given)[0]}: can't be had with --engine vllm")
    if settings.served_model_names:
        command += ["--served-model-name", *settings.served_model_names]
    command += ["--max-logprobs", str(settings.max_logprobs)]
    if not any(word.replace("_", "-").partition("=")[0] == _SHUTDOWN for word in more):
        command += [_SHUTDOWN, str(_SHUTDOWN_SECONDS)]
    command += more
    middleware = MiddlewareConfig(
        store=asked,
        shared=config["kv_connector"] == "MultiConnector",
        api_keys=settings.api_keys,
        allow_delete=settings.allow_delete,
        max_body_bytes=settings.max_body_bytes,
        spot_check=spot_check,
    )
    return command, {CONFIG_ENV: middleware.dumps(), FRONT_ENV: secrets.token_hex(16)}


def _kv_transfer_config(options: ServeOptions, layers: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """vLLM's configuration, and the store's options as the middleware keeps to them."""
    multi = (options.kv_transfer_config or {}).get("kv_connector") == "MultiConnector"
    if multi:
        config = json.loads(json.dumps(options.kv_transfer_config))
        children = config.get("kv_connector_extra_config", {}).get("connectors", [])
        ours = next((child for child in children if child.get("kv_connector") in CONNECTORS), None)
        if ours is None:
            raise OptionError("kv_transfer_config: MultiConnector needs a HiddenStatesConnector among its connectors")
        extra = ours.setdefault("kv_connector_extra_config", {})
        extra.update(options.store)
    else:
        config = ours = store_config(options)
        config["kv_role"] = config["kv_role"] or "kv_producer"
        extra = config["kv_connector_extra_config"]
    ours["kv_connector"] = "HiddenStatesConnector"
    if layers is not None and extra.get("layers") is None:
        extra["layers"] = layers
    handover = StoreOptions.parse(extra).handover
    asked = dict(extra)
    if is_object_store(handover):
        open_store(handover)  # what can't be had is said now
    else:
        extra.pop("handover", None)
    return config, asked


def _spot_check(one_in: Any, store: dict[str, Any]) -> int:
    """How often, if it can be: the check has to find the files that were published."""
    if isinstance(one_in, bool) or not isinstance(one_in, int) or one_in < 0:
        raise OptionError(f"spot_check: expected a whole number of at least 0, got {one_in!r}")
    options = StoreOptions.parse(store)
    if one_in and is_object_store(options.handover):
        raise OptionError(
            "spot_check: with --engine vllm it needs files that stay in the storage folder, not in object storage"
        )
    if one_in and not options.use_synchronization_lock:
        raise OptionError(
            "spot_check: with --engine vllm it waits on the files' locks: leave use_synchronization_lock on"
        )
    return one_in


def exec_vllm(options: ServeOptions, more: Sequence[str]) -> NoReturn:
    """Become vLLM's server.

    Raises:
        OptionError: what can't be had with vLLM, or vLLM isn't installed.
    """
    command, environment = vllm_command(options, more)
    require_vllm()
    warn_if_open(options.host, options.settings.api_keys, "use it")
    logger.info("running %s", shlex.join(command[1:]))
    given = {name: value for name, value in os.environ.items() if name != VLLM_KEY_ENV}
    os.execve(command[0], command, {**given, **environment})
