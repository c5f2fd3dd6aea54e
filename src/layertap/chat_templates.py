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

__all__ = ["variables"]

_CLOCK = "strftime_now"

_standing: ContextVar[Callable[[str], str] | None] = ContextVar("layertap_clock", default=None)


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
        PromptError: one of them is a function that this transformers keeps from templates.
    """
    plain = dict(given or {})
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
