"""The command `layertap`. One file a command; none imports torch before it runs."""

import sys


def main() -> None:
    """Run the command line."""
    from layertap.cli.app import make_app

    make_app()(args=sys.argv[1:], prog_name="layertap")
