"""Sampling parameters: layertap's, vLLM's own, or a mapping, as vLLM's."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from layertap.engines.base import ModelInfo
from layertap.errors import OptionError
from layertap.params import SamplingParams


def for_each(sampling_params: Any, count: int, info: ModelInfo) -> list[Any]:
    """One of vLLM's SamplingParams per prompt; vLLM's own objects keep what the embedded engine doesn't know.

    Raises:
        OptionError: a list of another length, or a bad value.
    """
    if sampling_params is None:
        return [to_vllm(SamplingParams(**info.generation_defaults))] * count
    if isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str):
        if len(sampling_params) != count:
            raise OptionError(
                f"sampling_params: a list of {len(sampling_params)} for {count} prompts; give one, or one each"
            )
        return [to_vllm(params) for params in sampling_params]
    return [to_vllm(sampling_params)] * count


def to_vllm(params: Any) -> Any:
    """vLLM's object.

    Raises:
        OptionError: a bad value, or nothing that says how to sample.
    """
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if isinstance(params, VllmSamplingParams):
        return params
    if isinstance(params, Mapping):
        own = {field.name for field in fields(SamplingParams)}
        more = {name: value for name, value in params.items() if name not in own}
        params = SamplingParams(**{name: value for name, value in params.items() if name in own})
    else:
        params, more = SamplingParams.coerce(params), {}
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    values["bad_words"] = values["bad_words"] or None
    structured = more.get("structured_outputs")
    try:
        if isinstance(structured, Mapping):
            more["structured_outputs"] = StructuredOutputsParams(**structured)
        return VllmSamplingParams(**values, **more)
    except (TypeError, ValueError) as exc:
        raise OptionError(f"sampling_params: vLLM refuses them: {exc}") from exc


def capture_options(params: Any) -> Mapping[str, Any] | None:
    """The capture options of vLLM's SamplingParams."""
    found: Mapping[str, Any] | None = (params.extra_args or {}).get("kv_transfer_params")
    return found


def with_capture_options(params: Any, options: Mapping[str, Any]) -> Any:
    """A copy with other capture options."""
    copied = params.clone()
    copied.extra_args = {**(params.extra_args or {}), "kv_transfer_params": dict(options)}
    return copied
