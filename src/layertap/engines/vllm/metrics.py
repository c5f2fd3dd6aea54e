"""Numbers through vLLM's own `/metrics`: rows, bytes, files, failures by reason, bytes in flight, seconds that the engine waited.

Reports are flat: `failures.disk` is the counter `failures` with the label `reason="disk"`.
"""

import contextlib
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from layertap.writing.kinds import KINDS

COUNTERS = {
    "rows": "Rows of hidden states in published files.",
    "bytes": "Bytes of rows in published files.",
    "files": "Files published.",
    "quarantined": "Files whose rows failed a check, kept where no reader takes them.",
    "refused": "Requests with options that can't be honoured.",
    "prefix_hits": "Rows of cached tokens that came from the host instead of being computed (prefix_rows_bytes).",
    "prefix_misses": "Rows of prompts that were computed, since their blocks or their kept rows weren't there (prefix_rows_bytes).",
    "prefix_evictions": "Blocks whose kept rows made room for others.",
    "prefix_lost": "Requests whose failure cost kept rows; all are then forgotten.",
    "device_bytes": "Bytes of rows copied from the device.",
    "waited_seconds": "Seconds in which rows waited for the byte budget: the disk is slower than the engine.",
}
FAILURES = {
    "failures": "Requests whose hidden states were lost, by reason; their error files say why.",
}
GAUGES = {
    "in_flight_bytes": "Bytes of rows in memory that are in no file yet.",
    "prefix_bytes": "Bytes of kept rows of cached blocks.",
}


class HiddenStatesStats(KVConnectorStats):  # type: ignore[misc]
    """What changed since the last report; gauges as they are."""

    data: dict[str, float]

    def reset(self) -> None:
        """Forget."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "HiddenStatesStats":
        """Add another report."""
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The numbers of a log line."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Nothing to report."""
        return not self.data


class HiddenStatesProm(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics `layertap:*` of each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister_earlier()
        made = {
            name: make(name=f"layertap:{name}", documentation=text, labelnames=labelnames)
            for make, kinds in ((self._counter_cls, COUNTERS), (self._gauge_cls, GAUGES))
            for name, text in kinds.items()
        }
        failures = {
            name: self._counter_cls(name=f"layertap:{name}", documentation=text, labelnames=[*labelnames, "reason"])
            for name, text in FAILURES.items()
        }
        _registered.extend([*made.values(), *failures.values()])
        self._metrics = {
            engine: {name: metric.labels(*values) for name, metric in made.items()}
            | {
                f"{name}.{kind}": metric.labels(
                    *values, kind
                )  # all at 0 from the start: an alert needs the first one too
                for name, metric in failures.items()
                for kind in KINDS
            }
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record a report."""
        for name, value in transfer_stats_data.items():
            if name in GAUGES:
                self._metrics[engine_idx][name].set(value)
            elif _grows(name):
                self._metrics[engine_idx][name].inc(value)


_registered: list[Any] = []


def _unregister_earlier() -> None:
    """An earlier engine of this process may have left its metrics behind; vLLM does the same with its own."""
    while _registered:
        with contextlib.suppress(KeyError):  # somebody else was first
            REGISTRY.unregister(_registered.pop())


def _grows(name: str) -> bool:
    kind = name.partition(".")
    return name in COUNTERS or (kind[0] in FAILURES and kind[2] in KINDS)


class Reporter:
    """Turns growing counts into reports of what changed."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def report(self, counts: dict[str, float]) -> HiddenStatesStats | None:
        """A report, or None where nothing changed."""
        if counts == self._last:  # nearly every step, and it is in the engine's loop
            return None
        changed = {name: value - self._last.get(name, 0) for name, value in counts.items() if _grows(name)}
        data = {name: value for name, value in changed.items() if value}
        data |= {name: counts[name] for name in GAUGES if name in counts and counts[name] != self._last.get(name, 0)}
        self._last = dict(counts)
        return HiddenStatesStats(data=data) if data else None
