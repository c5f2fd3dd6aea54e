"""The entry point of `vllm.general_plugins`: makes the connector's name known to vLLM, and does nothing else.

vLLM runs it in every process that it starts. Where the connector isn't configured nothing of vLLM is patched; what is patched
where it is configured stands in `activate`.
"""

import logging
import os

logger = logging.getLogger(__name__)

CONNECTOR = "HiddenStatesConnector"
CONNECTOR_MODULE = "layertap.engines.vllm.connector"
ACTIVE_ENV = "LAYERTAP_VLLM_ACTIVE"


def register() -> None:
    """Register the connector. Idempotent; never raises: a broken plugin must not take vLLM down."""
    try:
        _register()
    except Exception:  # whatever it is, vLLM must go on
        logger.exception("layertap: the plugin could not be registered; %s is not available", CONNECTOR)


def _register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    if os.environ.get(ACTIVE_ENV):  # the process that configured the connector started this one
        from layertap.engines.vllm.activate import activate

        activate()
