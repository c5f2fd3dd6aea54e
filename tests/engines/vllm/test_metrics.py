"""Reports become vLLM's metrics: counted once, by reason and by replica, also through MultiConnector and another process."""

import pytest
import torch
from file_cases import make_recorder, make_spec
from prometheus_client import CollectorRegistry, Counter, Gauge

from layertap.engines.vllm.collector import Collector
from layertap.engines.vllm.metrics import HiddenStatesProm, HiddenStatesStats, Reporter
from layertap.errors import EngineError


class _Config:
    kv_transfer_config = None


@pytest.fixture
def metrics():
    registry = CollectorRegistry()

    def bound(kind):
        return lambda **options: kind(registry=registry, **options)

    types = {Gauge: bound(Gauge), Counter: bound(Counter)}
    from prometheus_client import Histogram

    types[Histogram] = bound(Histogram)
    prom = HiddenStatesProm(_Config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})

    def value(name, engine="0", **labels):
        return registry.get_sample_value(name, {"model_name": "m", "engine": engine, **labels})

    return prom, value


def test_every_reason_is_there_from_the_start(metrics):
    _, value = metrics
    for reason in ("aborted", "disk", "engine", "exists", "rows", "other"):
        for engine in ("0", "1"):
            assert value("layertap:failures_total", engine, reason=reason) == 0


def test_what_the_recorder_counts_arrives_by_reason(metrics, tmp_path):
    prom, value = metrics
    recorder, reporter, spec = make_recorder(), Reporter(), make_spec()
    for name, cause in {
        "a": EngineError("the request was aborted before it was finished"),
        "b": OSError(28, "No space left on device"),
        "c": OSError(28, "No space left on device"),
        "d": EngineError("the tap failed"),
    }.items():
        capture = recorder.admit(spec, request_id=name, path=tmp_path / f"{name}.safetensors")
        capture.fail(cause)
        with pytest.raises(Exception, match=".+"):
            capture.result.result(30)
    collector = Collector(recorder, (0,), torch.float32)
    collector.close()
    report = reporter.report({**collector.counts(), "device_bytes": 12.0})
    prom.observe(report.data, 1)
    assert reporter.report({**collector.counts(), "device_bytes": 12.0}) is None
    found = {
        reason: value("layertap:failures_total", "1", reason=reason)
        for reason in ("aborted", "disk", "engine", "exists", "rows", "other")
    }
    assert found == {"aborted": 1, "disk": 2, "engine": 1, "exists": 0, "rows": 0, "other": 0}
    assert value("layertap:device_bytes_total", "1") == 12
    assert value("layertap:failures_total", "0", reason="disk") == 0


def test_reports_add_up_except_what_is_in_flight():
    first = HiddenStatesStats(data={"failures.disk": 1, "rows": 5, "in_flight_bytes": 100})
    first.aggregate(HiddenStatesStats(data={"failures.disk": 2, "failures.rows": 1, "in_flight_bytes": 40}))
    assert first.reduce() == {"failures.disk": 3, "failures.rows": 1, "rows": 5, "in_flight_bytes": 40}


def test_a_name_that_isnt_ours_is_left_alone(metrics):
    prom, value = metrics
    prom.observe({"failures.sunspots": 3, "unknown": 1})
    assert value("layertap:failures_total", reason="other") == 0
