"""Variables of a chat template that are functions, whatever the installed transformers makes of a template's variables.

From 5.23 on it makes plain data of all of them, and of a function its type's name in brackets. The one function that templates know
is the clock, `strftime_now`; it is put where the compiled template looks for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from layertap.errors import PromptError

__all__ = ["trouble_with", "variables"]

_CLOCK = "strftime_now"
_TAKEN = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "messages",
    "tokenize",
    "tools",
)

_standing: ContextVar[Callable[[str], str] | None] = ContextVar("layertap_clock", default=None)


def trouble_with(given: Mapping[str, Any]) -> str | None:
    """Say why these can't be further variables of a chat template; None where they can."""
    taken = ", ".join(repr(name) for name in given if name in _TAKEN)
    return f"chat_template_kwargs: {taken} has an option or a field of its own; give it there" if taken else None


@contextmanager
def variables(
    tokenizer: Any,
    given: Mapping[str, Any] | None,
    *,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Give what transformers is to be handed as the template's variables, for a rendering inside of the block.

    Raises:
        PromptError: one of them has a field of its own, or is a function that this transformers keeps from templates.
    """
    plain = dict(given or {})
    trouble = trouble_with(plain)
    if trouble is not None:
        raise PromptError(trouble)
    functions = [name for name, value in plain.items() if callable(value)]
    if not functions or not _are_made_plain():
        yield plain
        return
    if functions != [_CLOCK]:
        others = ", ".join(name for name in functions if name != _CLOCK)
        raise PromptError(
            f"chat_template_kwargs: {others}: transformers from 5.23 on gives templates no functions but {_CLOCK}; give values"
        )
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # transformers keeps what it compiled; until the block ends, the same is rendered
    compiled = _compile_jinja_template(tokenizer.get_chat_template(chat_template, tools))
    own = compiled.globals[_CLOCK]
    if not isinstance(own, _Clock):
        compiled.globals[_CLOCK] = _Clock(own)
    token = _standing.set(plain.pop(_CLOCK))
    try:
        yield plain
    finally:
        _standing.reset(token)


class _Clock:
    """The clock that is given for a rendering, or else the template's own."""

    def __init__(self, own: Callable[[str], str]) -> None:
        self._own = own

    def __call__(self, form: str) -> str:
        return (_standing.get() or self._own)(form)


def _are_made_plain() -> bool:
    from transformers.utils import chat_template_utils

    return hasattr(chat_template_utils, "_plain_template_data")
