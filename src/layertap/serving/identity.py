"""Who asks, and what things are called: API keys, owners, request ids.

With several API keys every id carries its owner, 8 hex digits derived from the key, in front of 64 random bits. So an id can't be
guessed, and one that leaked opens nothing for another key, also after a restart and in `layertap serve-files` over the same folder.
"""

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layertap.errors import OptionError

_ID = re.compile(r"[A-Za-z0-9_.%-]{1,220}")
_OWNED = re.compile(r"(?:.*-)?([0-9a-f]{8})[0-9a-f]{16}(?:-\d{1,6}-\d{1,6})?")
_MAX_CLIENT_ID = 64


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request; `owner` is "" where there are fewer than two keys."""

    owner: str = ""

    def may_see(self, name: str) -> bool:
        """Whether an id of a request belongs to this caller."""
        if not self.owner:
            return True
        match = _OWNED.fullmatch(name)
        return match is not None and match[1] == self.owner


class ApiKeys:
    """The keys that are let in; none lets everybody in.

    Args:
        keys: secrets; order doesn't matter.

    Raises:
        OptionError: an empty key.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        if any(not key.strip() for key in keys):
            raise OptionError("api_key: expected a key that isn't empty")
        unique = list(dict.fromkeys(keys))
        # a slow hash: the owner is part of file names, from which a weak key could be guessed otherwise
        self._callers = [(key.encode(), Caller(_owner(key) if len(unique) > 1 else "")) for key in unique]

    def __len__(self) -> int:
        return len(self._callers)

    def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """Who sent these headers; None if they may not come in. Bearer tokens, and Basic (any user name) for browsers."""
        if not self._callers:
            return Caller()
        given = _secret(headers.get("authorization", ""))
        found: Caller | None = None
        for key, caller in self._callers:  # all of them, so that the time says nothing
            if hmac.compare_digest(key, given):
                found = caller
        return found


def _owner(key: str) -> str:
    return hashlib.scrypt(key.encode(), salt=b"layertap owner", n=1 << 14, r=8, p=1, dklen=4).hex()


def _secret(header: str) -> bytes:
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode(errors="surrogateescape")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


def is_plain_id(name: str) -> bool:
    """Whether a name could be the id of a request: no separators, not hidden, not over-long."""
    return _ID.fullmatch(name) is not None and not name.startswith(".")


def clean_client_id(given: str) -> str:
    """A client's own request id with everything that isn't plain replaced, cut to 64 characters."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", given.strip())[:_MAX_CLIENT_ID]


def new_id(kind: str, caller: Caller, client_id: str | None = None) -> str:
    """An id for a request: `cmpl-[<client's>-][<owner>]<64 random bits>`."""
    cleaned = clean_client_id(client_id or "")
    return f"{kind}-{cleaned + '-' if cleaned else ''}{caller.owner}{secrets.token_hex(8)}"
