"""Progress of a long extraction: a bar on a terminal, a line every half minute elsewhere."""

import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task
from rich.text import Text

from layertap.cli.reporting import bytes_text, plural, say, seconds_text

if TYPE_CHECKING:
    from layertap.datasets.extraction import RunReport

_LINE_SECONDS = 30.0


class RunProgress:
    """Show a `RunReport` while it is filled.

    Args:
        total: records of the input, where known.
        quiet: show nothing.
    """

    def __init__(self, total: int | None, *, quiet: bool) -> None:
        self._total = total
        self._report: RunReport | None = None
        self._started = time.monotonic()
        self._last_line = self._started
        console = Console(stderr=True)
        self._bar = None if quiet or not console.is_terminal else _Bar(self, console)
        self._lines = not quiet and self._bar is None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, report: "RunReport") -> None:
        """Start counting time: what was done before doesn't make this run faster."""
        self._report = report
        self._started = time.monotonic()

    def tick(self) -> None:
        """Called for every prompt; writes a line now and then where there is no terminal."""
        now = time.monotonic()
        if self._lines and self._report is not None and now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            say(self.text())

    def text(self) -> str:
        """What is known, in one line."""
        report = self._report
        if report is None:
            return "checking what is done already"
        seconds = max(time.monotonic() - self._started, 1e-3)
        seen = f"{report.num_seen:,}" + (f"/{self._total:,}" if self._total is not None else "")
        parts = [
            f"{seen} prompts",
            f"{report.num_tokens / seconds:,.0f} tokens/s",
            f"{bytes_text(report.num_bytes / seconds)}/s",
            f"{bytes_text(report.num_bytes)}",
        ]
        if report.num_failed:
            parts.append(f"{report.num_failed:,} failed")
        done_now = report.num_samples + report.num_failed
        if self._total is not None and done_now:
            left = max(0, self._total - report.num_seen) * seconds / done_now
            parts.append(f"{seconds_text(left)} left")
        return ", ".join(parts)

    @property
    def share(self) -> float:
        """Records that are through, of all; 0 where unknown."""
        if self._report is None or not self._total:
            return 0.0
        return min(1.0, self._report.num_seen / self._total)


class _RunText(ProgressColumn):
    def __init__(self, run: RunProgress) -> None:
        super().__init__()
        self._run = run

    def render(self, task: Task) -> Text:
        return Text(self._run.text())


class _Bar(Progress):
    """Rich asks for its parts ten times a second, from its own thread; the numbers are read then."""

    def __init__(self, run: RunProgress, console: Console) -> None:
        super().__init__(SpinnerColumn(), BarColumn(24), _RunText(run), console=console, transient=True)
        self._run = run
        self._task = self.add_task("", total=None if run._total is None else 1.0)

    def get_renderables(self) -> Iterable[RenderableType]:
        self.update(self._task, completed=self._run.share)
        yield from super().get_renderables()


def summary(report: "RunReport") -> str:
    """Say what a run did."""
    rate = report.num_tokens / report.seconds if report.seconds else 0.0
    lines = [
        f"{plural(report.num_samples, 'sample')}, {plural(report.num_tokens, 'token')}, {bytes_text(report.num_bytes)} "
        f"of rows in {seconds_text(report.seconds)} ({rate:,.0f} tokens/s) -> {report.folder}"
    ]
    if report.num_skipped:
        lines.append(f"{plural(report.num_skipped, 'sample')} had been done before, by checksum")
    lines += [f"damaged, set aside and computed again: {message}" for message in report.damaged]
    return "\n".join(lines)


def is_terminal() -> bool:
    """True where somebody sees standard error."""
    return sys.stderr.isatty()
