"""The command `layertap`. One file a command; none imports torch before it runs."""

import sys


def missing_package(exc: ModuleNotFoundError, who: str) -> str | None:
    """What to tell whoever lacks a package that `who` needs; None where a module of layertap's own is missing."""
    if exc.name is None or exc.name.partition(".")[0] == "layertap":
        return None
    return f"{exc.name} isn't installed in this Python environment, and {who} needs it: pip install {exc.name}"


def main() -> None:
    """Run the command line."""
    try:
        from layertap.cli.app import make_app
    except ModuleNotFoundError as exc:
        message = missing_package(exc, "the command line")
        if message is None:
            raise
        raise SystemExit(f"error: {message}") from exc
    make_app()(args=sys.argv[1:], prog_name="layertap")
