"""The parameter objects of vLLM's documented surface: `SamplingParams` and `KVTransferConfig`.

Names, defaults and ranges are vLLM's. What the embedded engine can't honour is an OptionError that names it; nothing is ignored.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layertap.capture.layers import LayersLike
from layertap.capture.options import StoreOptions
from layertap.errors import OptionError

MAX_TEMPERATURE = 2.0
GREEDY_BELOW = 1e-5
LOWEST_TEMPERATURE = 1e-2
EXTRACTION = "extract_hidden_states"
CONNECTORS = ("HiddenStatesConnector", "ExampleHiddenStatesConnector")


@dataclass(kw_only=True)
class SamplingParams:
    """How tokens are sampled, as in vLLM (of which this is the part that the embedded engine honours).

    Attributes:
        n: sequences per prompt.
        presence_penalty, frequency_penalty: OpenAI's, in [-2, 2], over generated tokens.
        repetition_penalty: > 0; over prompt and generated tokens.
        temperature: in [0, 2]; 0 is greedy.
        top_p, top_k, min_p: the usual filters; top_k 0 or -1 is off.
        seed: a generator of the request's own; None draws from fresh entropy.
        stop: strings that end the text; not part of it unless include_stop_str_in_output.
        stop_token_ids: ids that end it.
        ignore_eos: go on past the end-of-sequence token.
        max_tokens: at most so many new tokens; None: up to the model's length.
        min_tokens: no end before so many.
        logprobs: log probabilities of the top n at each new token, and of the sampled one; -1: all.
        prompt_logprobs: the same for prompt tokens.
        detokenize: produce text.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string.
        logit_bias: token id -> bias in [-100, 100].
        allowed_token_ids: only these may be sampled.
        bad_words: texts that may not be generated.
        extra_args: `{"kv_transfer_params": {...}}`.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or ()))
        self.bad_words = list(dict.fromkeys(self.bad_words or ()))
        if self.seed == -1:
            self.seed = None
        if self.logit_bias is not None:
            self.logit_bias = {
                _whole(token, "logit_bias"): min(100.0, max(-100.0, _number(bias, "logit_bias")))
                for token, bias in self.logit_bias.items()
            }
        self._check_numbers()
        self._check_lists()
        if self.temperature < GREEDY_BELOW:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            _require(self.n == 1, "n", self.n, "1 with temperature 0: all sequences would be the same")
        else:
            self.temperature = max(self.temperature, LOWEST_TEMPERATURE)

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("temperature", 0.0, MAX_TEMPERATURE),
            ("min_p", 0.0, 1.0),
        ):
            value = _number(getattr(self, name), name)
            _require(low <= value <= high, name, value, f"a number in [{low:g}, {high:g}]")
        _require(0.0 < _number(self.top_p, "top_p") <= 1.0, "top_p", self.top_p, "a number in (0, 1]")
        penalty = _number(self.repetition_penalty, "repetition_penalty")
        _require(penalty > 0.0, "repetition_penalty", penalty, "a number greater than 0")
        for name, least in (("n", 1), ("top_k", -1), ("min_tokens", 0)):
            _require(_whole(getattr(self, name), name) >= least, name, getattr(self, name), f"at least {least}")
        for name, least in (("max_tokens", 1), ("logprobs", -1), ("prompt_logprobs", -1)):
            value = getattr(self, name)
            if value is True and name != "max_tokens":
                setattr(self, name, 1)
            elif value is not None:
                _require(_whole(value, name) >= least, name, value, f"at least {least}")
        if self.seed is not None:
            _whole(self.seed, "seed")
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, f"at most {self.max_tokens}")

    def _check_lists(self) -> None:
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            _require(all(isinstance(text, str) and text for text in texts), name, texts, "texts that aren't empty")
        _require(not self.stop or self.detokenize, "stop", self.stop, "detokenize=True with stop strings")
        for token in (*(self.stop_token_ids or ()), *(self.allowed_token_ids or ())):
            _whole(token, "stop_token_ids / allowed_token_ids")
        _require(
            self.allowed_token_ids is None or bool(self.allowed_token_ids), "allowed_token_ids", [], "at least one id"
        )
        unknown = sorted(set(self.extra_args or {}) - {"kv_transfer_params"})
        _require(not unknown, "extra_args", unknown, "only kv_transfer_params (this engine takes no other)")

    @property
    def greedy(self) -> bool:
        """True where the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """The capture options of the request."""
        return (self.extra_args or {}).get("kv_transfer_params")

    def replace(self, **changes: Any) -> "SamplingParams":
        """A copy with changes."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def coerce(cls, params: Any) -> "SamplingParams":
        """Take our own object, vLLM's, or a mapping.

        Raises:
            OptionError: a value that is not at its default and that this engine can't honour.
        """
        if isinstance(params, cls):
            return params
        names = {f.name for f in dataclasses.fields(cls)}
        if isinstance(params, Mapping):
            unknown = sorted(set(params) - names)
            what = f"some of {sorted(names)} (engine='vllm' takes all of vLLM's)"
            _require(not unknown, "sampling params", unknown, what)
            return cls(**params)
        fields = getattr(type(params), "__struct_fields__", None)  # vLLM's is a msgspec struct
        if fields is None or "temperature" not in fields:
            raise OptionError(f"sampling_params: expected SamplingParams, got {type(params).__name__} {params!r}")
        default = type(params)()
        changed = {
            name: getattr(params, name)
            for name in fields
            if name in names or getattr(params, name) != getattr(default, name)
        }
        derived = {
            "output_kind",
            "output_text_buffer_length",
            "skip_clone",
            "skip_reading_prefix_cache",
            "stream_interval",
        }
        refused = sorted(name for name in changed.keys() - names - derived if not name.startswith("_"))
        if refused:
            raise OptionError(f"sampling_params: the embedded engine can't honour {', '.join(refused)}")
        return cls(**{name: value for name, value in changed.items() if name in names})


@dataclass(kw_only=True)
class KVTransferConfig:
    """vLLM's object of that name, as far as hidden states need it.

    Attributes:
        kv_connector: "HiddenStatesConnector" (or vLLM's documented "ExampleHiddenStatesConnector").
        kv_role: "kv_producer", the default here.
        kv_connector_extra_config: the options of `StoreOptions`.
    """

    kv_connector: str | None = None
    kv_role: str | None = None
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    engine_id: str | None = None
    kv_connector_module_path: str | None = None

    @classmethod
    def coerce(cls, config: Any) -> "KVTransferConfig":
        """Take our own object, vLLM's, or a mapping.

        Raises:
            OptionError: an unknown key or type.
        """
        if isinstance(config, cls):
            return config
        names = [f.name for f in dataclasses.fields(cls)]
        if isinstance(config, Mapping):
            unknown = sorted(set(config) - set(names))
            _require(not unknown, "kv_transfer_config", unknown, f"some of {names}")
            return cls(**config)
        if not hasattr(config, "kv_connector_extra_config"):
            raise OptionError(f"kv_transfer_config: expected KVTransferConfig or a dict, got {type(config).__name__}")
        return cls(**{name: getattr(config, name) for name in names})

    def store_options(self) -> StoreOptions:
        """Check the config and return the store's options.

        Raises:
            OptionError: another connector, another role, or a bad option.
        """
        if self.kv_connector not in CONNECTORS:
            raise OptionError(
                f"kv_transfer_config.kv_connector: {self.kv_connector!r} moves no hidden states; use 'HiddenStatesConnector'"
            )
        if self.kv_role not in (None, "kv_producer", "kv_both"):
            raise OptionError(f"kv_transfer_config.kv_role: expected 'kv_producer', got {self.kv_role!r}")
        return StoreOptions.parse(self.kv_connector_extra_config)


def layers_of_speculative_config(config: Any) -> LayersLike | None:
    """The layer ids in vLLM's documented `speculative_config`, or None where it names none.

    Raises:
        OptionError: another method than extract_hidden_states.
    """
    if not isinstance(config, Mapping):
        raise OptionError(f"speculative_config: expected a mapping, got {type(config).__name__}")
    if config.get("method") != EXTRACTION:
        raise OptionError(
            f"speculative_config.method: the embedded engine has no speculative decoding ({config.get('method')!r}); "
            "only 'extract_hidden_states' is understood here, engine='vllm' runs the others"
        )
    unknown = sorted(set(config) - {"method", "num_speculative_tokens", "draft_model_config"})
    _require(not unknown, "speculative_config", unknown, "method, num_speculative_tokens, draft_model_config")
    hf_config = (config.get("draft_model_config") or {}).get("hf_config") or {}
    ids = hf_config.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return None
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise OptionError(f"speculative_config: eagle_aux_hidden_state_layer_ids: expected a list of ids, got {ids!r}")
    return tuple(ids)


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise OptionError(f"{name}: expected {expected}, got {value!r}")


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise OptionError(f"{name}: expected a finite number, got {value!r}")
    return float(value)


def _whole(value: Any, name: str) -> int:
    if isinstance(value, str) and name == "logit_bias" and value.lstrip("-").isdigit():
        return int(value)  # JSON keys are strings
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{name}: expected a whole number, got {value!r}")
    return value
