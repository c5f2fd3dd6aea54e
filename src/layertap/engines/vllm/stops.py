"""Stop strings: vLLM finds them in its front end, which then aborts the request in the engine, some tokens later perhaps.

So the engine's side can't tell a stop from a client that went away, nor how many tokens the client was given. The output is
detokenized once more here, token by token, by vLLM's own detokenizer, with the same answer as in the front end.
"""

import logging
from typing import Any

logger = logging.getLogger(__name__)


class StopFinder:
    """Finds where a request's stop string ended it.

    Args:
        model_config: vLLM's.
    """

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config
        self._tokenizer: Any = None

    def kept_output_tokens(self, request: Any) -> int | None:
        """How many generated tokens the client was given, or None where no stop string occurs."""
        if not request.sampling_params.stop:
            return None
        from vllm.tokenizers.registry import cached_tokenizer_from_config
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        if self._tokenizer is None:
            self._tokenizer = cached_tokenizer_from_config(self._model_config)
        detokenizer = IncrementalDetokenizer.from_new_request(self._tokenizer, request)
        for token in request.output_token_ids:
            if detokenizer.update([token], False) is not None:
                return int(detokenizer.num_output_tokens())
        return None
