"""Admission in front of vLLM: options are checked, the request gets an id, room and places in the store, or is refused.

A connector can't answer 400, 409 or 507; here it is still early enough. Imports no engine.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from layertap.capture.options import StoreOptions
from layertap.capture.request import RequestOptions
from layertap.errors import LayertapError, TargetExistsError
from layertap.files.claims import taken_by_another
from layertap.files.paths import SUFFIX, target_path
from layertap.files.tags import reserve_tag
from layertap.serving.api_errors import ApiError, from_exception
from layertap.serving.handoff import refuse_anothers_file
from layertap.serving.identity import Caller, new_id
from layertap.writing.room import Reservation, StoreRoom

if TYPE_CHECKING:
    from layertap.serving.vllm_room import RequestSizes

ID_KEY, PROMPTS_KEY, PRIVATE = "layertap_id", "layertap_prompts", "layertap_"
FRONT_ENV, FRONT_KEY = "LAYERTAP_VLLM_FRONT", "layertap_front"
"""Options by which this side tells the engine where files go; clients may not use them. The last one proves it."""
ERROR_KEY = "hidden_states_error"

Scope = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may go to vLLM.

    Attributes:
        name: its id.
        body: as vLLM gets it.
        handles: per choice, in the order of the answer's indices; empty without capture.
        tag: the tag's record.
        replaces: where the client chose the path: whether an existing file is to be replaced. None with a path of our own, which
            carries 64 random bits and is nobody else's.
    """

    name: str
    body: bytes
    handles: list[dict[str, Any]]
    tag: Path | None = None
    room: Reservation | None = None
    replaces: bool | None = None

    def end(self) -> None:
        """The answer is there, or will not come. What was set aside counts as used until the files are counted anew."""
        if self.room is not None:
            self.room.settle(self.room.num_bytes)

    def answer(self, index: int) -> dict[str, Any]:
        """The handle of a choice that ended, or why there is none: its path may have become another's since we looked."""
        told = self.handles[index]
        if self.replaces is None:
            return told
        path, name = Path(told["hidden_states_path"]), told["hidden_states_id"]
        taken = taken_by_another(path, name, overwrite=self.replaces)
        return told if taken is None else {ERROR_KEY: taken}

    def withdraw(self) -> None:
        """vLLM refused it: its tag is free again."""
        if self.tag is not None:
            self.tag.unlink(missing_ok=True)
        if self.room is not None:
            self.room.settle(0)


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    reason: None = None
    done: None = None


class Places:
    """Where files are whose clients chose their paths, the latest of them."""

    def __init__(self, kept: int = 20_000) -> None:
        self._kept = kept
        self._places: OrderedDict[str, _Place] = OrderedDict()

    def note(self, handles: Iterable[Mapping[str, Any]]) -> None:
        for handle in handles:
            self._places[handle["hidden_states_id"]] = _Place(Path(handle["hidden_states_path"]))
        while len(self._places) > self._kept:
            self._places.popitem(last=False)

    def get(self, name: str) -> _Place | None:
        return self._places.get(name)

    def note_fetched(self, name: str) -> None:
        """Nothing is done earlier for it."""


class RequestDesk:
    """Admits requests.

    Args:
        options: the store's, as clients are held to them.
        shared: other connectors share `kv_transfer_params`.
        room: of the store.
    """

    def __init__(self, options: StoreOptions, shared: bool, room: StoreRoom) -> None:
        self._options = options
        self._shared = shared
        self._room = room
        self._sizes: RequestSizes | None = None
        self.places = Places()
        self._front = os.environ.get(FRONT_ENV)

    def admit(self, raw: bytes, kind: str, caller: Caller, scope: Scope) -> Admitted | None:
        """Check and place a request; None where vLLM may say what is wrong with it."""
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        if not isinstance(body, dict):
            return None
        given = body.get("kv_transfer_params")
        num_prompts, num_choices = _counts(body)
        if (given is not None and not isinstance(given, dict)) or num_prompts is None or num_choices is None:
            return None
        own = {} if given is None else given
        if any(str(key).startswith(PRIVATE) for key in own):
            raise ApiError(400, "kv_transfer_params: unknown option", param="kv_transfer_params", code="invalid_value")
        try:
            options = RequestOptions.parse(own, foreign_keys_allowed=self._shared)
            wanted = self._options.capture_by_default if options.capture is None else options.capture
            client_id = body.pop("request_id", None)
            header_id = Headers(scope=scope).get("x-request-id")
            name = new_id(kind, caller, client_id if isinstance(client_id, str) else header_id)
            if wanted and body.get("use_beam_search"):
                if given is not None:
                    raise ApiError(
                        400,
                        "kv_transfer_params: beam search saves no hidden states; run its sequences as prompts with max_tokens=1",
                        param="kv_transfer_params",
                        code="invalid_value",
                    )
                wanted = False
            if not wanted:
                return Admitted(name, json.dumps(body).encode(), [])
            most = self._sizes_of(scope).most_bytes(body, options, num_prompts, num_choices)
            room = self._room.reserve(target_path(self._options, name, options.hidden_states_path), most)
            try:
                return self._place(body, own, options, name, (num_prompts, num_choices), caller, room)
            except BaseException:
                room.settle(0)
                raise
        except (LayertapError, ValueError, OSError) as exc:
            raise from_exception(exc, path_is_the_clients="hidden_states_path" in own) from exc

    def _sizes_of(self, scope: Scope) -> "RequestSizes":
        if self._sizes is None:  # vLLM has its configuration only once it has started
            from layertap.serving.vllm_room import RequestSizes

            self._sizes = RequestSizes(scope["app"].state.vllm_config)
        return self._sizes

    def _place(
        self,
        body: dict[str, Any],
        own: Mapping[str, Any],
        options: RequestOptions,
        name: str,
        counts: tuple[int, int],
        caller: Caller,
        room: Reservation,
    ) -> Admitted:
        base = target_path(self._options, name, options.hidden_states_path)
        handles: list[dict[str, Any]] = []
        for place in range(counts[0]):
            for choice in range(counts[1]):
                suffix = f"-{place}-{choice}" if place or choice else ""
                path = base.with_name(f"{base.name.removesuffix(SUFFIX)}{suffix}{SUFFIX}")
                if not options.overwrite and os.path.lexists(path):
                    raise TargetExistsError(f"{path} exists already; `overwrite` would replace it")
                refuse_anothers_file(path, caller)
                handles.append({"hidden_states_path": str(path), "hidden_states_id": name + suffix})
        replaces = None if options.hidden_states_path is None else options.overwrite
        tag: Path | None = None
        if options.tag is not None:
            tag = reserve_tag(self._options.shared_storage_path, options.tag, name, handles, owner=caller.owner)
        if options.hidden_states_path is not None:
            self.places.note(handles)
        told = {key: value for key, value in own.items() if key != "tag"}
        told |= {"hidden_states_path": str(base), ID_KEY: name, PROMPTS_KEY: counts[0]}
        if self._front is not None:
            told[FRONT_KEY] = self._front
        Path(base).parent.mkdir(parents=True, exist_ok=True)
        return Admitted(name, json.dumps({**body, "kv_transfer_params": told}).encode(), handles, tag, room, replaces)


def _counts(body: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Prompts and choices of a request; None where they make no sense and vLLM will say so."""
    n = body.get("n")
    num_choices = 1 if n is None else n
    if isinstance(num_choices, bool) or not isinstance(num_choices, int) or not 1 <= num_choices <= 1024:
        return None, None
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        if not prompt or len(prompt) > 4096:
            return None, None
        return (1 if isinstance(prompt[0], int) else len(prompt)), num_choices
    return 1, num_choices
