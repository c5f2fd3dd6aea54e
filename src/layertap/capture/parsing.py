"""Checked parsing of user mappings into the option dataclasses: one way for server and request options.

An unknown key, a wrong type or a bad value is an OptionError that names the key, what was expected, and the nearest right
key. Nothing is coerced: `"false"` isn't a bool.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from layertap.errors import OptionError

T = TypeVar("T")
Check = Callable[[Any], Any]


def option(default: Any, check: Check, doc: str) -> Any:
    """A dataclass field with its check (returns the normal form or raises ValueError) and its one-sentence doc."""
    return dataclasses.field(default=default, metadata={"check": check, "doc": doc})


def parse_fields(cls: type[T], mapping: Mapping[str, Any], where: str, *, foreign_keys_allowed: bool = False) -> T:
    """Build `cls` from `mapping`.

    Args:
        cls: a dataclass whose fields were made by `option`.
        mapping: what the user gave.
        where: the name of the mapping in messages ("kv_transfer_params").
        foreign_keys_allowed: others share the mapping (MultiConnector): refuse only near-misses of our keys.

    Raises:
        OptionError: see the module's docstring.
    """
    if not isinstance(mapping, Mapping):
        raise OptionError(f"{where}: expected a mapping of options, got {type(mapping).__name__} {mapping!r}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.75 if foreign_keys_allowed else 0.5)
            if foreign_keys_allowed and not near:
                continue
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"{where}: unknown option {key!r}{hint} (options: {', '.join(sorted(fields))})")
        try:
            values[key] = fields[key].metadata["check"](value)
        except OptionError as exc:
            raise OptionError(f"{where}.{key}: {exc}") from exc
        except ValueError as exc:
            raise OptionError(f"{where}.{key}: {exc}, got {type(value).__name__} {value!r}") from exc
    return cls(**values)


def boolean(value: Any) -> bool:
    """True or False, nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def text(value: Any) -> str:
    """A string that isn't empty and holds no NUL."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("expected a string that isn't empty (and holds no NUL)")
    return value


def integer(minimum: int) -> Check:
    """A whole number of at least `minimum`."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"expected a whole number of at least {minimum}")
        return value

    return check


def seconds(value: Any) -> float:
    """A positive number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError("expected a positive number of seconds")
    return float(value)


def one_of(*choices: str) -> Check:
    """One of the words."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
            raise ValueError(
                f"expected one of {', '.join(map(repr, choices))}" + (f" (did you mean {near[0]!r}?)" if near else "")
            )
        return value

    return check


def optional(check: Check) -> Check:
    """None, or what `check` takes."""
    return lambda value: None if value is None else check(value)
