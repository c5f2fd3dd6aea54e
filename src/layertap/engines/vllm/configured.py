"""What vLLM's configuration says about hidden states: whether the connector is configured, its options, the layers."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layertap.capture.layers import DEFAULT_LAYERS, resolve_layers
from layertap.capture.options import StoreOptions
from layertap.engines.vllm import compat
from layertap.engines.vllm.plugin import CONNECTOR
from layertap.errors import OptionError

logger = logging.getLogger(__name__)

_MULTI = "MultiConnector"
_EXTRACTION = "extract_hidden_states"
_SHARED_KEY = "layertap_shared"
"""Put into our own part of MultiConnector's configuration: the connector itself is only shown that part."""
_FEWEST_CORES, _CORES_PER_WRITER, _MOST_WRITERS = 8, 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """The connector's configuration, resolved against the model.

    Attributes:
        options: the store's options.
        layers: what the server captures, in the order of the configuration.
        num_layers: blocks of the model.
        hidden_size: width of the residual stream.
        dtype: compute dtype, by name.
        shared: other connectors share `kv_transfer_params`.
    """

    options: StoreOptions
    layers: tuple[int, ...]
    num_layers: int
    hidden_size: int
    dtype: str
    shared: bool


def extra_config(kv_transfer_config: Any) -> Mapping[str, Any] | None:
    """The connector's own options, also as a child of vLLM's MultiConnector; None where it isn't configured."""
    if kv_transfer_config is None:
        return None
    extra: Mapping[str, Any] = kv_transfer_config.kv_connector_extra_config
    if kv_transfer_config.kv_connector == CONNECTOR:
        return extra
    if kv_transfer_config.kv_connector == _MULTI:
        for child in extra.get("connectors", ()):
            if child.get("kv_connector") == CONNECTOR:
                return dict(child.get("kv_connector_extra_config") or {})
    return None


def configured(config: Any) -> Configured | None:
    """Resolve vLLM's configuration; None where the connector isn't configured.

    Raises:
        OptionError: an unknown option, a bad value, options that exclude each other, or a layer that doesn't exist.
    """
    extra = extra_config(config.kv_transfer_config)
    if extra is None:
        return None
    options = StoreOptions.parse({name: value for name, value in extra.items() if name != _SHARED_KEY})
    num_writers(options)
    num_layers = compat.num_layers(config)
    wanted = options.layers
    if wanted is None:
        wanted = layers_of_extraction(config.speculative_config)
    if wanted is None:
        logger.info("no layers were given: taking the preset %r", DEFAULT_LAYERS)
        wanted = DEFAULT_LAYERS
    return Configured(
        options=options,
        layers=resolve_layers(wanted, num_layers),
        num_layers=num_layers,
        hidden_size=compat.hidden_size(config),
        dtype=options.save_dtype or compat.dtype_name(config.model_config.dtype),
        shared=config.kv_transfer_config.kv_connector == _MULTI or extra.get(_SHARED_KEY) is True,
    )


def num_writers(options: StoreOptions) -> int:
    """Writer processes of one engine.

    Raises:
        OptionError: several were asked for where one has to know of everything.
    """
    asked = options.num_writer_processes
    for name in ("prefix_rows_bytes", "max_storage_bytes"):
        if getattr(options, name) is not None:
            if asked is not None and asked > 1:
                raise OptionError(
                    f"num_writer_processes: {asked} can't be had with {name}, which one process has to keep count of; leave it out"
                )
            return 1
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0))
    # each one costs the engine's process some 0.1 ms a step (benchmarks/vllm_writer.py)
    return 1 if cores < _FEWEST_CORES else min(_MOST_WRITERS, max(2, cores // _CORES_PER_WRITER))


def prepare(config: Any) -> Configured | None:
    """Make vLLM's finished configuration ready for the engine's processes; called before they start.

    Raises:
        OptionError, EngineError: what can't be had, said before anything is loaded.
    """
    if extra_config(config.kv_transfer_config) is None:
        return None
    compat.check_version()
    compat.check_config(config)
    drop_extraction(config)
    if getattr(config.kv_transfer_config, "kv_connector", None) == _MULTI:
        own = _own_part(config.kv_transfer_config)
        if own is not None:
            own[_SHARED_KEY] = True
    return configured(config)


def _own_part(kv_transfer_config: Any) -> dict[str, Any] | None:
    """The connector's own options, to be written to."""
    extra: dict[str, Any] = kv_transfer_config.kv_connector_extra_config
    if kv_transfer_config.kv_connector == CONNECTOR:
        return extra
    for child in extra.get("connectors", ()):
        if child.get("kv_connector") == CONNECTOR:
            child["kv_connector_extra_config"] = dict(child.get("kv_connector_extra_config") or {})
            found: dict[str, Any] = child["kv_connector_extra_config"]
            return found
    return None


def drop_extraction(config: Any) -> None:
    """Take the layers out of vLLM's documented extraction configuration, and the configuration out of vLLM's."""
    extra = extra_config(config.kv_transfer_config)
    if extra is None or getattr(config.speculative_config, "method", None) != _EXTRACTION:
        return
    ids = layers_of_extraction(config.speculative_config)
    own = _own_part(config.kv_transfer_config)
    if own is not None and ids is not None and "layers" not in own:
        own["layers"] = list(ids)
    config.speculative_config = None
    logger.warning(
        "speculative_config: 'extract_hidden_states' isn't needed with %s: its layer ids were read, its draft model isn't run, and "
        "speculative_config is free for real speculative decoding",
        CONNECTOR,
    )


def layers_of_extraction(speculative_config: Any) -> tuple[int, ...] | None:
    """The layer ids of vLLM's documented `extract_hidden_states` configuration, or None."""
    if speculative_config is None or getattr(speculative_config, "method", None) != _EXTRACTION:
        return None
    draft = getattr(speculative_config, "draft_model_config", None)
    ids = getattr(getattr(draft, "hf_config", None), "eagle_aux_hidden_state_layer_ids", None)
    return tuple(int(layer) for layer in ids) if ids else None
