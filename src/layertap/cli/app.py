"""The list of commands."""

import importlib
from typing import Any

import typer

from layertap import __version__
from layertap.cli.helping import Command

COMMANDS = {
    "plan": "layertap.cli.plan:plan",
    "extract": "layertap.cli.extract:extract",
    "serve": "layertap.cli.serve:serve",
    "serve-files": "layertap.cli.serve_files:serve_files",
    "inspect": "layertap.cli.inspect:inspect",
    "verify": "layertap.cli.verify:verify",
    "doctor": "layertap.cli.doctor:doctor",
    "export": "layertap.cli.export:export",
    "import": "layertap.cli.import_:import_",
    "clean": "layertap.cli.clean:clean",
}
"""Name -> function, in the order of the help. The modules are cheap to import; the work behind them isn't."""

CONTEXTS: dict[str, dict[str, Any]] = {
    # vLLM's flags are written with dashes or underscores, and those that aren't ours go to its own server
    "serve": {
        "token_normalize_func": lambda word: word.replace("_", "-"),
        "ignore_unknown_options": True,
        "allow_extra_args": True,
    },
}

SEVERAL_VALUES = ("--served-model-name", "--api-key")
"""Options of `serve` that vLLM documents with several values behind one flag."""


class ServeCommand(Command):
    """`--api-key A B` means `--api-key A --api-key B`, as for vLLM, where the model stands first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See the class."""
        return super().parse_args(ctx, _flag_before_each(args) if args and not args[0].startswith("-") else args)


def _flag_before_each(args: list[str]) -> list[str]:
    found: list[str] = []
    flag = None
    for word in args:
        if word.startswith("-"):
            name, has_value, _ = word.replace("_", "-").partition("=")
            flag = name if name in SEVERAL_VALUES else None
            fresh = not has_value
        elif flag is not None and not fresh:
            found.append(flag)
        else:
            fresh = False
        found.append(word)
    return found


EPILOG = "Exit codes: 0 done; 1 failed; 2 wrong options; 3 done, but some prompts failed or something is damaged; 130 stopped."


def make_app() -> typer.Typer:
    """Build the command line."""
    app = typer.Typer(
        name="layertap",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        help="Hidden states out of LLM inference: any layers of any model, never wrong in silence.",
        epilog=EPILOG,
    )

    @app.callback(invoke_without_command=True)
    def root(
        version: bool = typer.Option(False, "--version", help="Print the version."),
    ) -> None:
        if version:
            typer.echo(__version__)
            raise typer.Exit

    for name, place in COMMANDS.items():
        module, _, function = place.partition(":")
        kind = ServeCommand if name == "serve" else Command
        app.command(name, cls=kind, context_settings=CONTEXTS.get(name))(
            getattr(importlib.import_module(module), function)
        )
    return app
