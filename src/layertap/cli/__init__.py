"""The command `layertap`. One file a command; none imports torch before it runs."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from layertap.cli.app import make_app
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] == "layertap":
            raise
        raise SystemExit(
            f"error: {exc.name} isn't installed in this Python environment, and the command line needs it: pip install {exc.name}"
        ) from exc
    make_app()(args=sys.argv[1:], prog_name="layertap")
