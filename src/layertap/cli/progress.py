"""Progress of a long extraction: a bar on a terminal, a line every half minute elsewhere."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task
from rich.text import Text

from layertap.cli.reporting import bytes_text, plural, say, seconds_text

if TYPE_CHECKING:
    from layertap.datasets.extraction import RunReport

_LINE_SECONDS = 30.0
_WINDOW_SECONDS = 60.0
_POINT_SECONDS = 0.5


class _Point(NamedTuple):
    time: float
    records: int
    tokens: int
    num_bytes: int


class RunProgress:
    """Show a `RunReport` while it is filled. Rates are those of the last minute: loading and self-test don't count.

    Args:
        total: records of the input, where known.
        quiet: show nothing.
        console: where; default standard error.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        total: int | None,
        *,
        quiet: bool,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self._clock = clock
        self._report: RunReport | None = None
        self._note = "checking what is done already"
        self._points: deque[_Point] = deque()
        self._last_line = clock()
        console = console or Console(stderr=True)
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
        """The run starts: what was done before is known."""
        self._report = report
        self._note = "starting"

    def note(self, message: str) -> None:
        """Say something of importance; on a terminal it stays in view."""
        self._note = message
        if self._bar is None:
            say(message)

    def tick(self) -> None:
        """Called for every prompt; writes a line now and then where there is no terminal."""
        now = self._clock()
        if self._lines and now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            say(self.text())

    def text(self) -> str:
        """What is known, in one line."""
        report = self._report
        if report is None:
            return self._note
        seen = f"{report.num_seen:,}" + (f"/{self.total:,}" if self.total is not None else "")
        parts = [f"{seen} prompts"]
        first, last = self._window(report)
        seconds = last.time - first.time
        if seconds > 0 and (
            seconds >= _LINE_SECONDS or last.tokens > first.tokens
        ):  # none yet isn't 0; none for long is
            parts += [
                f"{(last.tokens - first.tokens) / seconds:,.0f} tokens/s",
                f"{bytes_text((last.num_bytes - first.num_bytes) / seconds)}/s",
            ]
            if self.total is not None and last.records > first.records:
                left = max(0, self.total - report.num_seen) * seconds / (last.records - first.records)
                parts.append(f"{seconds_text(left)} left")
        if report.num_failed:
            parts.append(f"{report.num_failed:,} failed")
        if self._note.startswith("stop") or not last.records:
            parts.append(self._note)
        return ", ".join(parts)

    @property
    def share(self) -> float:
        """Records that are through, of all; 0 where unknown."""
        if self._report is None or not self.total:
            return 0.0
        return min(1.0, self._report.num_seen / self.total)

    def _window(self, report: "RunReport") -> tuple[_Point, _Point]:
        """The oldest point of the last minute since the first result, and now."""
        now = _Point(self._clock(), report.num_samples + report.num_failed, report.num_tokens, report.num_bytes)
        points = self._points
        if now.records and (not points or now.time - points[-1].time >= _POINT_SECONDS):
            points.append(now)
        while len(points) > 1 and now.time - points[0].time > _WINDOW_SECONDS:
            points.popleft()
        return (points[0] if points else now), now


class _RunText(ProgressColumn):
    def __init__(self, run: RunProgress) -> None:
        super().__init__()
        self._run = run

    def render(self, task: Task) -> Text:
        return Text(self._run.text())


class _Bar(Progress):
    """Rich asks for its parts ten times a second, from its own thread; the numbers are read then."""

    def __init__(self, run: RunProgress, console: Console) -> None:
        super().__init__(SpinnerColumn(), BarColumn(16), _RunText(run), console=console, transient=True)
        self._run = run
        self.add_task("", total=None if run.total is None else 1.0)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            task.completed = self._run.share
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
    if report.num_shared:
        lines.append(
            f"{plural(report.num_shared, 'sample')} begin with rows of another one ({plural(report.num_shared_tokens, 'token')}), "
            "which are stored once"
        )
    done = report.compression
    if done.stored_bytes:
        speed = done.row_bytes / max(done.seconds, 1e-9)
        lines.append(
            f"compressed to {bytes_text(done.stored_bytes)}, {done.row_bytes / done.stored_bytes:.2f} times smaller, at "
            f"{bytes_text(speed)}/s a core"
        )
    lines += [f"damaged, set aside and computed again: {message}" for message in report.damaged]
    return "\n".join(lines)
