"""The front end's side: bad options are a ValueError there, before anything is generated."""

import logging
import re
from typing import Any, cast

from layertap.engines.vllm.configured import configured
from layertap.engines.vllm.orders import CHOICES_KEY, Asked, OrderDesk
from layertap.errors import LayertapError, OptionError, TargetExistsError

logger = logging.getLogger(__name__)

_DESK = "_layertap_desk"
_ONLINE = re.compile(r"-beam-\d+$")
_BEAM_TOLD = "_layertap_beam_told"
_NO_CAPTURE = {"kv_transfer_params": {"capture": False}}


def check(processor: Any, request: Any) -> None:
    """Check a processed request's `kv_transfer_params`; note how many choices it has.

    Raises:
        OptionError, TargetExistsError: a bad option, or the file exists; nothing was generated. Each is vLLM's own kind of
            validation error too, which its server answers with a 400.
    """
    try:
        _check(processor, request)
    except (OptionError, TargetExistsError) as exc:
        raise _as_vllm_says_it(exc) from exc


def _check(processor: Any, request: Any) -> None:
    if not hasattr(processor, _DESK):
        found = configured(processor.vllm_config)
        desk = None if found is None else OrderDesk(found, processor.model_config.max_model_len)
        setattr(processor, _DESK, desk)
    desk = getattr(processor, _DESK)
    params = request.sampling_params
    if desk is None or params is None:
        return
    if _is_step_of_beam_search(request.request_id, params):
        if desk.configured.options.capture_by_default and not getattr(processor, _BEAM_TOLD, False):
            setattr(processor, _BEAM_TOLD, True)
            logger.warning(
                "layertap: beam search makes a request of its own for each step of each beam; none of them is captured. For the "
                "rows of the sequences that it returns, run their tokens as prompts with max_tokens=1"
            )
        params.extra_args = dict(_NO_CAPTURE)
        return
    extra = params.extra_args or {}
    mine = extra.get("kv_transfer_params")
    prompt_len = len(request.prompt_token_ids) if request.prompt_token_ids is not None else 0
    desk.order(
        Asked(
            request_id=request.request_id,
            params=mine,
            prompt_len=prompt_len,
            max_tokens=params.max_tokens or 1,
            has_token_ids=request.prompt_token_ids is not None and request.prompt_embeds is None,
        )
    )
    if params.n > 1:
        params.extra_args = {**extra, "kv_transfer_params": {**(mine or {}), CHOICES_KEY: params.n}}


def _is_step_of_beam_search(request_id: str, params: Any) -> bool:
    """vLLM's beam search leaves no other mark than the parameters that it makes, which no client can send."""
    if params.max_tokens != 1 or not params.logprobs or params.extra_args:
        return False
    if _ONLINE.search(request_id) is not None:
        return not params.detokenize
    return params.skip_clone and request_id.isdigit()  # offline, vLLM 0.26 leaves `detokenize` on


def _as_vllm_says_it(exc: LayertapError) -> BaseException:
    from vllm.exceptions import VLLMValidationError

    refused: Any = type(type(exc).__name__, (type(exc), VLLMValidationError), {})(str(exc))
    refused.parameter, refused.value = "kv_transfer_params", None
    return cast(BaseException, refused)
