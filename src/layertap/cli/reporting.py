"""What a user sees when something ends: exit codes, errors as one message, sizes and times in words."""

import contextlib
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from layertap.cli import missing_package
from layertap.errors import LayertapError, OptionError

FAILED = 1
WRONG_OPTIONS = 2
PARTLY = 3
STOPPED = 130

_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


@contextlib.contextmanager
def errors_explained() -> Iterator[None]:
    """Turn errors that users can act on into a message and an exit code; others keep their traceback."""
    try:
        yield
    except OptionError as exc:
        say_error(str(exc))
        raise typer.Exit(WRONG_OPTIONS) from exc
    except (LayertapError, OSError) as exc:
        say_error(_message(exc))
        raise typer.Exit(FAILED) from exc
    except ModuleNotFoundError as exc:
        message = missing_package(exc, "this command")
        if message is None:
            raise
        say_error(message)
        raise typer.Exit(FAILED) from exc
    except KeyboardInterrupt as exc:
        say("stopped")
        raise typer.Exit(STOPPED) from exc


def say_error(message: str) -> None:
    """Print an error to standard error."""
    typer.secho(f"error: {message}", fg=None if os.environ.get("NO_COLOR") else "red", err=True)


def say(message: str) -> None:
    """Print news to standard error, beside a program's output."""
    typer.echo(message, err=True)


def quiet_libraries() -> None:
    """Keep progress bars and advice of libraries out of our output. Call before they are imported."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def parse_bytes(text: str, option: str | None = None) -> int:
    """Read "2GiB", "500 MB" or "1000000"; the option that it was given for is named where it can't be read.

    Raises:
        typer.BadParameter: it is no size.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise typer.BadParameter(f"expected a size such as 2GiB or 500MB, got {text!r}", param_hint=option)
    return int(float(match[1]) * factor)


def parse_json(name: str, text: str | None) -> dict[str, Any] | None:
    """A JSON object from the command line.

    Raises:
        OptionError: it is none.
    """
    if text is None:
        return None
    try:
        parsed = json.loads(text)
    except ValueError as exc:
        raise OptionError(f"{name}: expected a JSON object: {exc}; got {text!r}") from exc
    if not isinstance(parsed, dict):
        raise OptionError(f"{name}: expected a JSON object, got {text!r}")
    return parsed


def parse_percent(text: str) -> float:
    """Read "0.1%" as 0.001.

    Raises:
        typer.BadParameter: it is no share, or none of anything.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*%\s*", text)
    share = float(match[1]) / 100 if match else 0.0
    if not 0 < share <= 1:
        raise typer.BadParameter(f"expected a share such as 0.1% or 5%, above 0% and at most 100%, got {text!r}")
    return share


def parse_shard(text: str) -> tuple[int, int]:
    """Read "0/4".

    Raises:
        typer.BadParameter: it is no share.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise typer.BadParameter(f"shard: expected i/n with i from 0 to n - 1, such as 0/4, got {text!r}")
    return int(match[1]), int(match[2])


def bytes_text(num_bytes: float) -> str:
    """Say a size in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """Say a duration as 1:02:03."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def runs_text(ids: Sequence[int]) -> str:
    """Say ids in their order; runs of three and more as their ends: 0-3, 7."""
    found: list[str] = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[end - 1] + 1:
            run = ids[start:end]
            found += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
            start = end
    return ", ".join(found)


def fitted(line: str, indent: int) -> str:
    """Break a line where the terminal ends, what follows indented; where there is no terminal it stays one line."""
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def plural(count: int, noun: str) -> str:
    """Say a count of things."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _message(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.strerror and exc.filename is not None:
        return f"{exc.filename}: {exc.strerror}"
    return str(exc)
