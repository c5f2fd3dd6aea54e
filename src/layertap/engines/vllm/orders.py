"""The scheduler's side: from a request's `kv_transfer_params` to an order, or to a refusal.

Used twice: in the front end, where a bad option is a ValueError before anything is generated (an HTTP 400), and in the scheduler's
process, where raising would end the engine and a bad option becomes a failed request with its error file.
"""

import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layertap.capture.layers import select_slots
from layertap.capture.request import CaptureSpec, RequestOptions
from layertap.engines.vllm.configured import Configured
from layertap.engines.vllm.messages import Order
from layertap.errors import OptionError, TargetExistsError
from layertap.files.paths import SUFFIX, target_path
from layertap.files.tags import reserve_tag, tag_path

CHOICES_KEY = "layertap_choices"
"""Put into kv_transfer_params by the front end where n > 1: the engine then sees one request per choice, with the same options."""
ID_KEY = "layertap_id"
"""Put there by our own front end: the id that the client knows the request by."""
PREFILL_KEY = "layertap_prefill"
"""Put there by our own front end: only the prompt is wanted; the token that vLLM samples anyway is no part of the sequence."""

FRONT_ENV, FRONT_KEY = "LAYERTAP_VLLM_FRONT", "layertap_front"
"""A secret of the server's processes and the option that carries it: what has it comes from our middleware, which has checked and
placed it. vLLM has routes that the middleware doesn't know, and what came through them is a client's, with a client's rights."""

PROMPTS_KEY = "layertap_prompts"
"""Put there by our middleware: how many prompts the HTTP request has; one request per prompt reaches the engine."""

ERROR_KEY = "hidden_states_error"
"""In an answer, in place of a handle: why there is none."""

_PLACE = re.compile(r".*-(\d+)-[0-9a-f]{8}|.*-(\d+)", re.DOTALL)  # vLLM's internal ids end in random digits
_CHILD = re.compile(r"(\d+)_(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as the engine sees it.

    Attributes:
        request_id: vLLM's.
        params: its kv_transfer_params.
        prompt_len: tokens of the prompt.
        max_tokens: upper bound of generated tokens, within the model's length.
        has_token_ids: the prompt is tokens, not embeddings.
        lora: name of its adapter, or None.
    """

    request_id: str
    params: Mapping[str, Any] | None
    prompt_len: int
    max_tokens: int
    has_token_ids: bool
    lora: str | None = None


class OrderDesk:
    """Turns requests into orders. Knows no vLLM object.

    Args:
        configured: the connector's configuration.
        max_model_len: the most tokens of a sequence.
    """

    def __init__(self, configured: Configured, max_model_len: int) -> None:
        self.configured = configured
        self._max_model_len = max_model_len
        self._front = os.environ.get(FRONT_ENV)

    def order(self, asked: Asked) -> Order | None:
        """The order of a request; None where nothing is to be captured.

        Raises:
            OptionError: a bad option.
            TargetExistsError: the file exists.
        """
        if asked.params is not None and not isinstance(asked.params, Mapping):
            raise OptionError(f"kv_transfer_params: expected a mapping of options, got {type(asked.params).__name__}")
        mine = dict(asked.params or {})
        choices = mine.pop(CHOICES_KEY, 1)
        store = self.configured.options
        if self._front is not None:
            if hmac.compare_digest(self._front.encode(), str(mine.pop(FRONT_KEY, "")).encode(errors="replace")):
                store = replace(store, allow_custom_save_path=True)
            else:
                mine = {name: value for name, value in mine.items() if name not in (ID_KEY, PREFILL_KEY, PROMPTS_KEY)}
        public_id = mine.pop(ID_KEY, None)
        prefill = mine.pop(PREFILL_KEY, False) is True
        place = _place(asked.request_id) if mine.pop(PROMPTS_KEY, 1) > 1 else 0
        options = RequestOptions.parse(mine, foreign_keys_allowed=self.configured.shared)
        if not (store.capture_by_default if options.capture is None else options.capture):
            return None
        if not asked.has_token_ids:
            raise OptionError(
                "kv_transfer_params: hidden states of a prompt given as embeddings can't be checked; refused"
            )
        choice = _choice(asked.request_id) if choices > 1 else 0
        suffix = f"-{place}-{choice}" if place or choice else ""
        path = target_path(store, asked.request_id, options.hidden_states_path)
        if (
            suffix
            and options.hidden_states_path is not None
            and path.name == os.path.basename(options.hidden_states_path)
        ):
            path = path.with_name(f"{path.name.removesuffix(SUFFIX)}{suffix}{SUFFIX}")
        spec = CaptureSpec(
            layers=self._layers(options),
            dtype=options.save_dtype or self.configured.dtype,
            hidden_size=self.configured.hidden_size,
            prompt_len=asked.prompt_len,
            max_tokens=0 if prefill else max(1, min(asked.max_tokens, self._max_model_len - asked.prompt_len)),
            window=options.window,
        )
        spec.window.admit(spec.prompt_len, spec.max_tokens)
        if not options.overwrite and os.path.lexists(path):
            raise TargetExistsError(f"{path} exists already; `overwrite` would replace it")
        if options.tag is not None and not choice and tag_path(store.shared_storage_path, options.tag).exists():
            raise OptionError(
                f"kv_transfer_params.tag: {options.tag!r} is taken by an earlier request; tags are used once"
            )
        return Order(
            request_id=asked.request_id,
            spec=spec,
            path=str(path),
            overwrite=options.overwrite,
            public_id=asked.request_id if public_id is None else f"{public_id}{suffix}",
            tag=options.tag,
            prefill=prefill,
            lora=asked.lora,
        )

    def reserve_tag(self, order: Order, choices: int = 1) -> None:
        """Write the tag's record, once per request.

        Raises:
            OptionError: the tag is taken.
            OSError: the storage can't be written to.
        """
        if order.tag is None or (choices > 1 and _choice(order.request_id)):
            return
        handles = [handle(order)]
        if choices > 1:
            handles = [self._sibling_handle(order, choice) for choice in range(choices)]
        reserve_tag(self.configured.options.shared_storage_path, order.tag, order.public_id, handles)

    def _sibling_handle(self, order: Order, choice: int) -> dict[str, str]:
        parts = _CHILD.fullmatch(order.request_id)
        sibling = order.request_id if parts is None else f"{choice}_{parts[2]}"
        path = Path(order.path)
        default = target_path(self.configured.options, order.request_id, None)
        if path == default:
            path = target_path(self.configured.options, sibling, None)
        elif choice:
            path = path.with_name(f"{path.name.removesuffix(SUFFIX)}-0-{choice}{SUFFIX}")
        return {"hidden_states_path": str(path), "hidden_states_id": sibling}

    def fallback_path(self, request_id: str) -> Path:
        """Where the error of a request with bad options goes."""
        return target_path(self.configured.options, request_id, None)

    def _layers(self, options: RequestOptions) -> tuple[int, ...]:
        if options.layers is None:
            return self.configured.layers
        return select_slots(options.layers, self.configured.layers, self.configured.num_layers)


def handle(order: Order) -> dict[str, str]:
    """What the client is told."""
    return {"hidden_states_path": order.path, "hidden_states_id": order.public_id}


def _choice(request_id: str) -> int:
    parts = _CHILD.fullmatch(request_id)
    return int(parts[1]) if parts else 0


def _place(request_id: str) -> int:
    parts = _PLACE.fullmatch(request_id)
    return int(parts[1] or parts[2]) if parts else 0
