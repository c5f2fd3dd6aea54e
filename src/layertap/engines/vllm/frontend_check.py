"""The front end's side: bad options are a ValueError there, before anything is generated."""

from typing import Any, cast

from layertap.engines.vllm.configured import configured
from layertap.engines.vllm.orders import CHOICES_KEY, Asked, OrderDesk
from layertap.errors import LayertapError, OptionError, TargetExistsError

_DESK = "_layertap_desk"


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


def _as_vllm_says_it(exc: LayertapError) -> BaseException:
    from vllm.exceptions import VLLMValidationError

    refused: Any = type(type(exc).__name__, (type(exc), VLLMValidationError), {})(str(exc))
    refused.parameter, refused.value = "kv_transfer_params", None
    return cast(BaseException, refused)
