"""How commands read their words, and the page that `layertap COMMAND --help` prints: no name is ever cut, however narrow
the terminal is."""

import inspect
import os
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand


class Command(TyperCommand):
    """A command of layertap. Each panel has two columns: names, and what they mean with type and default."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`~/states` is in the home folder also where no shell says so, as in `--out=~/states`."""
        return super().parse_args(ctx, [_at_home(word) for word in args])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See the class."""
        console = Console(highlight=False)
        console.print(Text.assemble(("Usage: ", "bold yellow"), (_usage(self, ctx), "bold")))
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            console.print(Text("\n" + " ".join(paragraph.split())))
        console.print()
        for title, params in _panels(self.get_params(ctx)):
            console.print(Panel(_table(params), title=title, title_align="left", border_style="dim"))


def _at_home(word: str) -> str:
    name, is_, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{name}{is_}{os.path.expanduser(value)}" if value == "~" or value.startswith("~/") else word


def _usage(command: TyperCommand, ctx: Any) -> str:
    words = [param.name.upper() for param in command.params if param.param_type_name == "argument"]
    needed = [f"{param.opts[0]} ..." for param in command.params if param.required and param.opts[0].startswith("-")]
    return " ".join([ctx.command_path, *words, *needed, "[OPTIONS]"])


def _panels(params: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Arguments first, what has no panel last, the others in their order."""
    found: dict[str, list[Any]] = {}
    for param in params:
        title = "Arguments" if param.param_type_name == "argument" else getattr(param, "rich_help_panel", None)
        found.setdefault(title or "Options", []).append(param)
    yield from sorted(found.items(), key=lambda panel: panel[0] == "Options")


def _table(params: list[Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for param in params:
        meaning = Text(" ".join((getattr(param, "help", None) or "").split()))
        if facts := "; ".join(_facts(param)):
            meaning.append((" " if meaning else "") + f"[{facts}]", style="dim")
        table.add_row(Text("\n".join(_names(param)), style="bold cyan"), meaning)
    return table


def _names(param: Any) -> Iterator[str]:
    """A line a name; a short one stands before the first."""
    if param.param_type_name == "argument":
        yield param.name.upper()
        return
    names = [*param.opts, *param.secondary_opts]
    short = [name for name in names if not name.startswith("--")]
    first, *others = [name for name in names if name.startswith("--")]
    value = "" if getattr(param, "is_flag", False) else " VALUE"
    yield ", ".join([*short, first]) + value
    yield from (name + value for name in others)


def _facts(param: Any) -> Iterator[str]:
    kinds = (
        getattr(param, place, None) for place in ("type", "type_descriptor")
    )  # of typer's older and newer releases
    choices = next((found for kind in kinds if (found := getattr(kind, "choices", None))), ())
    if choices:
        yield "|".join(map(str, choices))
    is_option, is_flag = param.param_type_name == "option", getattr(param, "is_flag", False)
    if is_option and param.required:
        yield "required"
    default = param.default
    if is_flag and param.secondary_opts and isinstance(default, bool):
        yield f"default {(param.opts if default else param.secondary_opts)[0]}"
    elif is_option and param.show_default and not is_flag and default is not None:
        yield f"default {default:g}" if isinstance(default, float) else f"default {default}"
