"""One generation while it runs: its rules resolved, its tokens so far, its text, and what it tells its caller."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layertap.engines.base import Delta, GenerateJob, ModelInfo, TopLogprobs
from layertap.engines.transformers.detokenize import Detokenizer
from layertap.engines.transformers.sampler import Draw, SamplerRow, SamplingRules, TokenLogprob
from layertap.engines.transformers.stepping import LiveSequence
from layertap.engines.transformers.stopping import Finish, StopRules
from layertap.errors import EngineError, LayertapError, OptionError, PromptError
from layertap.params import SamplingParams

__all__ = ["Running", "check_params", "start"]

_keys = itertools.count()


@dataclass(slots=True, eq=False)
class Running:
    """A job that was admitted.

    Attributes:
        key: its name in the stepper; never reused, so that a late row can't reach another request.
        job: what was asked for.
        row: what the sampler needs; `row.output_ids` are the tokens so far.
        stop: what ends it.
        text: the detokenizer, None without text.
        finish: how it ended.
    """

    key: str
    job: GenerateJob
    prompt_ids: list[int]
    row: SamplerRow
    stop: StopRules
    text: Detokenizer | None
    finish: Finish | None = None

    @property
    def live(self) -> LiveSequence:
        """What a stepper needs to know."""
        capture = self.job.capture
        longest = min(len(self.prompt_ids) + self.job.max_tokens, self.stop.max_len)
        return LiveSequence(self.key, self.prompt_ids, longest, None if capture is None else capture.spec)

    def take(self, draw: Draw) -> Delta:
        """Append the next token; `finish` is set if it was the last."""
        token_id = draw.token_id
        self.row.output_ids.append(token_id)
        self.finish = self.stop.check(token_id, len(self.row.output_ids), len(self.prompt_ids))
        fresh = ""
        if self.text is not None:
            ended = self.finish is not None and self.finish.ended_by_token
            stop_string = self.text.feed(token_id, ends_sequence=ended)
            if stop_string is not None:
                self.finish = Finish("stop", stop_string)
            fresh = self.text.take(finished=self.finish is not None)
        return Delta(
            token_ids=(token_id,),
            text=fresh,
            logprobs=None if draw.logprobs is None else (_top(token_id, draw.logprobs),),
            finish_reason=None if self.finish is None else self.finish.reason,
            stop_reason=None if self.finish is None else self.finish.stop_reason,
        )


def _top(token_id: int, entries: tuple[TokenLogprob, ...]) -> TopLogprobs:
    return TopLogprobs(token_id=token_id, entries={e.token_id: (e.logprob, e.rank) for e in entries})


def start(job: GenerateJob, info: ModelInfo, tokenizer: Any) -> Running:
    """Check a job and resolve it.

    Raises:
        PromptError: the prompt can't be run.
        OptionError: an option can't be honoured; it is named.
    """
    prompt_ids = _checked_prompt(np.asarray(job.prompt_ids, np.int64), info)
    params = job.params
    text = None
    if tokenizer is not None and params.detokenize:
        text = Detokenizer(
            tokenizer,
            prompt_ids,
            stops=_listed(params.stop),
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )
    elif _listed(params.stop):
        raise OptionError("stop: stop strings need text, but there is no tokenizer or detokenize is false")
    if job.max_tokens < 1:
        raise OptionError(f"max_tokens: at least 1, got {job.max_tokens}")
    return Running(
        key=f"{next(_keys)}:{job.request_id}",
        job=job,
        prompt_ids=prompt_ids,
        row=SamplerRow(_rules(params, info, tokenizer), prompt_ids),
        stop=_stop_rules(job, info),
        text=text,
    )


def _checked_prompt(prompt_ids: NDArray[np.int64], info: ModelInfo) -> list[int]:
    if not len(prompt_ids):
        raise PromptError("the prompt is empty: at least one token is needed")
    if len(prompt_ids) >= info.max_model_len:
        raise PromptError(
            f"the prompt has {len(prompt_ids)} tokens; with one generated token that is more than the "
            f"{info.max_model_len} that {info.model} allows"
        )
    outside = prompt_ids[(prompt_ids < 0) | (prompt_ids >= info.vocab_size)]
    if len(outside):
        raise PromptError(f"token id {outside[0]} is outside of the vocabulary: ids are 0 to {info.vocab_size - 1}")
    found: list[int] = prompt_ids.tolist()
    return found


def _stop_rules(job: GenerateJob, info: ModelInfo) -> StopRules:
    params = job.params
    stop_ids = set(params.stop_token_ids or ())
    eos_id = None
    if not params.ignore_eos and info.eos_token_ids:
        eos_id, *others = info.eos_token_ids
        stop_ids |= set(others)
    return StopRules(eos_id=eos_id, stop_ids=stop_ids, max_tokens=job.max_tokens, max_len=info.max_model_len)


def _rules(params: SamplingParams, info: ModelInfo, tokenizer: Any) -> SamplingRules:
    if params.prompt_logprobs is not None:
        raise OptionError("prompt_logprobs: the transformers engine doesn't give them; leave it out")
    bias = {int(token_id): float(value) for token_id, value in (params.logit_bias or {}).items()}
    allowed = None if params.allowed_token_ids is None else tuple(params.allowed_token_ids)
    for name, ids in (("logit_bias", bias), ("allowed_token_ids", allowed or ())):
        outside = [token_id for token_id in ids if not 0 <= token_id < info.vocab_size]
        if outside:
            raise OptionError(f"{name}: token id {outside[0]} is outside of the vocabulary of {info.vocab_size}")
    held_back = {*(params.stop_token_ids or ()), *info.eos_token_ids}
    return SamplingRules(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        min_tokens=params.min_tokens,
        held_back_ids=tuple(sorted(i for i in held_back if 0 <= i < info.vocab_size)),
        logit_bias=tuple(bias.items()),
        allowed_ids=allowed,
        bad_word_ids=_bad_word_ids(_listed(params.bad_words), tokenizer),
        logprobs=params.logprobs,
        seed=params.seed,
    )


def _bad_word_ids(words: list[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Each word as it is tokenized at the start and, where that differs in its first token only, after a space."""
    if words and tokenizer is None:
        raise OptionError("bad_words: they need a tokenizer, and there is none")
    found: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if not plain:
            raise OptionError(f"bad_words: {word!r} has no tokens")
        found.append(plain)
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return tuple(found)


def check_params(params: SamplingParams, info: ModelInfo, tokenizer: Any) -> None:
    """Refuse what this engine can't honour, before anything is reserved for the request.

    Raises:
        OptionError: an option; it is named.
    """
    if _listed(params.stop) and (tokenizer is None or not params.detokenize):
        raise OptionError("stop: stop strings need text, but there is no tokenizer or detokenize is false")
    _rules(params, info, tokenizer)


def _listed(value: str | list[str] | tuple[str, ...] | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def as_error(error: BaseException) -> BaseException:
    """What the caller is told: our own errors as they are, others with the engine's name on them."""
    if isinstance(error, LayertapError):
        return error
    wrapped = EngineError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
