"""Whether vLLM is there at all: said in one sentence, before anything is loaded or started."""

import importlib.util

from layertap.errors import OptionError


def require_vllm() -> None:
    """Refuse to go on without vLLM.

    Raises:
        OptionError: it isn't installed; the message says how it is.
    """
    if importlib.util.find_spec("vllm") is None:
        raise OptionError(
            "engine: vLLM isn't installed in this Python environment; pip install 'layertap[vllm]', or take the default "
            "engine, 'transformers'"
        )
