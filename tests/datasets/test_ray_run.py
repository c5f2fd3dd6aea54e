"""Two actors of a Ray cluster on this machine; one is killed on the way."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from layertap import LLM
from layertap.datasets.extraction import RunOptions, extract_dataset
from layertap.datasets.inputs import open_input
from layertap.datasets.ray_run import RayOptions, extract_with_ray, started_cluster
from layertap.datasets.reader import open_dataset
from layertap.datasets.writer import ShardOptions
from layertap.errors import LayerError, OptionError
from layertap.testing import zoo

COUNT = 1500
OPTIONS = RunOptions(layers=[0, -1], shards=ShardOptions(shard_bytes=200_000, fsync=False))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return zoo.save("llama", tmp_path_factory.mktemp("zoo") / "llama")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("input") / "in.jsonl"
    rows = [json.dumps({"prompt": f"prompt number {number} " * (1 + number % 4)}) for number in range(COUNT)]
    rows[7] = '{"prompt": '
    rows[900] = json.dumps({"prompt": "too long " * 900})
    path.write_text("\n".join(rows))
    return open_input(path)


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    # workers find what this process finds
    path = os.pathsep.join([*filter(None, sys.path), os.environ.get("PYTHONPATH", "")])
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": {"PYTHONPATH": path}},
        )
        yield ray
        ray.shutdown()


class KillOne:
    """Asked as `should_stop` is; kills the first actor that has written something."""

    def __init__(self):
        self.report = None
        self.killed = None

    def begin(self, report):
        self.report = report

    def __call__(self):
        if self.killed is None and self.report is not None and self.report.num_samples > 200:
            actor = next(one for one in self.report.actors if one.num_samples)
            self.killed = actor.pid
            os.kill(actor.pid, signal.SIGKILL)
        return False


def assert_same(left, right):
    """The same samples, failures and bytes; only the places in the shards differ."""
    left, right = open_dataset(left, verify=True), open_dataset(right, verify=True)
    assert left.indices.tolist() == right.indices.tolist()
    assert left.failures == right.failures
    for position in range(len(left)):
        mine, other = left.entry(position), right.entry(position)
        assert (mine.checksum, mine.source_hash, mine.tokens) == (other.checksum, other.source_hash, other.tokens)


@pytest.mark.slow
def test_a_run_whose_actor_is_killed_ends_like_a_run_of_one_process(ray, checkpoint, source, folder, tmp_path):
    engine = {"dtype": "float32", "device": "cpu", "max_model_len": 512}
    with LLM(checkpoint, **engine) as llm:
        asked = iter(range(COUNT))
        extract_dataset(llm, source, tmp_path / "one", OPTIONS)
        # what Ray continues was begun without it
        extract_dataset(llm, source, folder, OPTIONS, should_stop=lambda: next(asked) >= 100)
    began = len(open_dataset(folder))
    killer = KillOne()
    report = extract_with_ray(
        str(checkpoint),
        source,
        folder,
        OPTIONS,
        ray_options=RayOptions(actors=2, cpus=0.5),
        on_start=killer.begin,
        should_stop=killer,
        **engine,
    )
    assert killer.killed is not None
    assert [actor.died for actor in report.actors].count(True) == report.num_died == 1
    assert (report.num_samples, report.num_skipped, report.num_failed) == (COUNT - 2 - began, began, 2)
    assert sum(actor.num_samples for actor in report.actors) == report.num_samples
    assert {where.rpartition("/")[2] for where, _ in report.failures} == {"in.jsonl line 8", "in.jsonl line 901"}
    assert_same(tmp_path / "one", folder)
    assert not list(folder.glob("**/.*"))
    # and without it, it is known to be done
    with LLM(checkpoint, **engine) as llm:
        again = extract_dataset(llm, source, folder, OPTIONS)
    assert (again.num_skipped, again.num_samples) == (COUNT - 2, 0)


def test_what_the_actors_refuse_reaches_the_caller_as_it_is(ray, checkpoint, source, folder):
    wrong = RunOptions(layers=[99])
    with pytest.raises(LayerError, match="layer 99"):
        extract_with_ray(
            str(checkpoint), source, folder, wrong, ray_options=RayOptions(actors=1, cpus=0.5), device="cpu"
        )


def test_options_that_ray_cannot_honour_are_refused(ray, source, folder):
    with pytest.raises(OptionError, match="layout"):
        extract_with_ray("model", source, folder, RunOptions(layers=[0], layout="files"))
    with pytest.raises(OptionError, match="ray_actors: the cluster has no GPU"):
        extract_with_ray("model", source, folder, OPTIONS, device="cpu")
    with pytest.raises(OptionError, match="device"):
        extract_with_ray("model", source, folder, OPTIONS, device="cuda:1")
    for wrong in ({"actors": 0}, {"cpus": 0}):
        with pytest.raises(OptionError, match="ray_"):
            RayOptions(**wrong)
    assert not Path(folder).exists() or not list(folder.glob("**/*.parquet"))


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_the_cluster_of_ray_start_is_the_one_that_ray_would_take(tmp_path, monkeypatch, variable):
    utils = pytest.importorskip("ray._common.utils")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    assert started_cluster() is None
    place = Path(utils.get_ray_address_file(None))
    assert place.is_relative_to(tmp_path)
    place.parent.mkdir(parents=True)
    place.write_text("10.0.0.1:6379\n")
    assert started_cluster() == "10.0.0.1:6379"
