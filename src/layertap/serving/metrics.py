"""`/metrics`: what the server did and does, in Prometheus' form. Read at scrape time from where it is counted anyway."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from layertap.frontend import Frontend
from layertap.serving.book import Book
from layertap.writing.kinds import KINDS

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/hidden_states",
    "/metrics",
    "/health",
    "/v1/weights",
)


class Metrics:
    """The server's metrics, in a registry of their own.

    Args:
        front: the core, whose corridor is read.
        book: where captures are followed.
    """

    def __init__(self, front: Frontend, book: Book) -> None:
        self._front = front
        self._book = book
        self._num_tokens = 0
        self.registry = CollectorRegistry()
        self._answers = Counter(
            "layertap_requests", "HTTP requests, by route and status.", ("route", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "layertap_request_seconds",
            "From a request's first byte to its answer's last.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._publish_seconds = Histogram(
            "layertap_publish_seconds",
            "From a capture's admission to its file.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._tokens = Counter("layertap_tokens", "Tokens, by kind.", ("kind",), registry=self.registry)
        self._reaped_files = Counter(
            "layertap_reaped_files", "Files that the reaper removed, by why.", ("why",), registry=self.registry
        )
        self._reaped_bytes = Counter("layertap_reaped_bytes", "Bytes that the reaper freed.", registry=self.registry)
        for kind in ("prompt", "generated"):
            self._tokens.labels(kind)
        for why in ("expired", "quota", "leftover", "deleted"):
            self._reaped_files.labels(why)
        # clocks jump
        book.on_ready = lambda entry: self._publish_seconds.observe(
            max(0.0, (entry.ended or entry.admitted) - entry.admitted)
        )
        self.registry.register(self)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count an answer."""
        route = next((known for known in _ROUTES if path == known or path.startswith(known + "/")), "other")
        self._answers.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def generated(self, prompt_tokens: int, generated_tokens: int) -> None:
        """Count tokens of a request that ended."""
        self._tokens.labels("prompt").inc(prompt_tokens)
        self._tokens.labels("generated").inc(generated_tokens)
        self._num_tokens += prompt_tokens + generated_tokens

    def num_tokens(self) -> int:
        """Tokens so far, those of running requests too."""
        return self._num_tokens + self._front.num_running_tokens

    def reaped(self, why: str, num_files: int, num_bytes: int) -> None:
        """Count what was removed."""
        self._reaped_files.labels(why).inc(num_files)
        self._reaped_bytes.inc(num_bytes)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What is counted elsewhere."""
        recorder, totals, room = self._front.recorder, self._book.totals, self._front.recorder.room
        budget = recorder.budget
        yield _gauge("layertap_requests_running", "Sequences that run or wait.", self._front.num_running)
        yield CounterMetricFamily("layertap_rows", "Rows in published files.", value=totals.rows)
        yield CounterMetricFamily("layertap_bytes", "Bytes of published files.", value=totals.num_bytes)
        files = GaugeMetricFamily("layertap_files", "Captures since the start, by state.", labels=["state"])
        files.add_metric(["writing"], self._book.num_writing)
        for state, count in totals.files.items():
            files.add_metric([state], count)
        yield files
        failures = CounterMetricFamily("layertap_failures", "Captures that failed, by reason.", labels=["reason"])
        for reason in KINDS:
            failures.add_metric([reason], totals.failures.get(reason, 0))
        yield failures
        yield CounterMetricFamily(
            "layertap_quarantined_files",
            "Files whose rows failed a check, kept where no reader takes them.",
            value=recorder.counts.quarantined,
        )
        shipped = CounterMetricFamily(
            "layertap_shipped_files", "Files sent to object storage, by outcome.", labels=["outcome"]
        )
        for outcome, count in recorder.shipped.items():
            shipped.add_metric([outcome], count)
        yield shipped
        checks = CounterMetricFamily(
            "layertap_spot_checks",
            "Sequences that were computed a second time, by outcome.",
            labels=["kind", "outcome"],
        )
        worst = GaugeMetricFamily(
            "layertap_spot_check_worst_error", "Largest median relative error of a layer.", labels=["kind"]
        )
        for kind, counts in self._front.engine.spot_checks.items():
            checks.add_metric([kind, "passed"], counts.checked - counts.failed)
            checks.add_metric([kind, "failed"], counts.failed)
            worst.add_metric([kind], counts.worst)
        yield checks
        yield worst
        yield _gauge("layertap_bytes_in_flight", "Bytes of rows in memory, in no file yet.", budget.in_flight_bytes)
        yield _gauge("layertap_bytes_in_flight_limit", "What of them may be.", budget.limit_bytes)
        yield CounterMetricFamily(
            "layertap_backpressure_seconds",
            "Seconds that the engine waited for the writers.",
            value=budget.waited_seconds,
        )
        yield _gauge("layertap_store_used_bytes", "Bytes of files in the store.", room.used_bytes)
        yield _gauge("layertap_store_reserved_bytes", "What running requests may still write.", room.reserved_bytes)
        yield _gauge("layertap_store_quota_bytes", "max_storage_bytes; 0 is none.", room.quota_bytes or 0)
        yield _gauge("layertap_store_free_bytes", "Free on the store's file system.", _free(room.folder))


def _gauge(name: str, doc: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, doc, value=value)


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
