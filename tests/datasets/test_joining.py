import json
import shutil

import pytest
from dataset_cases import make_manifest, make_sample, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap import LLM
from layertap.datasets.extraction import RunOptions, extract_dataset
from layertap.datasets.inputs import open_input
from layertap.datasets.joining import shard_folder
from layertap.datasets.loader import HiddenStatesStream
from layertap.datasets.reader import open_dataset
from layertap.datasets.writer import ShardOptions
from layertap.errors import CorruptError, ForeignError, MissingError, OptionError
from layertap.testing import zoo


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 40), number=st.integers(1, 9), limit=st.one_of(st.none(), st.integers(1, 45)))
def test_shares_are_disjoint_and_together_the_whole(tmp_path_factory, count, number, limit):
    path = tmp_path_factory.getbasetemp() / "shares.txt"
    path.write_text("".join(f"line {n}\n" for n in range(count)))
    whole = [(record.index, record.source_hash) for record in open_input(path, limit=limit)]
    shares = [list(open_input(path, limit=limit, share=(share, number))) for share in range(number)]
    assert sorted((one.index, one.source_hash) for share in shares for one in share) == whole
    again = [list(open_input(path, limit=limit, share=(share, number))) for share in range(number)]
    assert again == shares


def test_a_share_that_does_not_exist_is_refused(tmp_path):
    (tmp_path / "in.txt").write_text("a\n")
    for share in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(OptionError, match="shard"):
            open_input(tmp_path / "in.txt", share=share)


def test_machines_that_share_a_run_make_what_one_machine_makes(tmp_path):
    path = tmp_path / "in.jsonl"
    rows = [{"prompt": f"number {number}"} for number in range(10)] + [{"no": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = RunOptions(layers=[0, -1], shards=ShardOptions(fsync=False))
    with LLM(zoo.save("llama", tmp_path / "llama"), dtype="float32", device="cpu", max_model_len=64) as llm:
        extract_dataset(llm, open_input(path), tmp_path / "one", options)
        for share in range(3):
            folder = tmp_path / "all" / shard_folder(share, 3)
            source = open_input(path, share=(share, 3))
            for stop in (2, 99):  # stopped on the way, and continued
                asked = iter(range(99))
                report = extract_dataset(llm, source, folder, options, should_stop=lambda a=asked, s=stop: next(a) >= s)
            assert (report.num_seen, report.num_skipped) == (len(range(share, 11, 3)), 2)
        with pytest.raises(OptionError, match="options.shard"):
            extract_dataset(llm, open_input(path), folder, options)
    one, joined = open_dataset(tmp_path / "one"), open_dataset(tmp_path / "all", verify=True)
    assert joined.indices.tolist() == one.indices.tolist()
    assert joined.failures == one.failures
    for left, right in zip(one, joined, strict=True):
        assert left["token_ids"].tolist() == right["token_ids"].tolist()
        assert (left["hidden_states"] - right["hidden_states"]).abs().max() < 1e-5
    assert joined.entry(4).source_hash == one.entry(4).source_hash
    assert sorted(item["index"] for item in HiddenStatesStream(tmp_path / "all")) == one.indices.tolist()


@pytest.fixture
def halves(tmp_path):
    for share in range(2):
        options = {"max_model_len": 64, "field": None, "shard": f"{share}/2"}
        manifest = make_manifest(options=options)
        write_dataset(tmp_path / shard_folder(share, 2), range(share, 9, 2), manifest=manifest)
    return tmp_path


def test_rows_of_all_shares_come_in_the_order_of_the_input(halves):
    for index, item in enumerate(open_dataset(halves, verify=True)):
        assert item["index"] == index
        assert item["hidden_states"].numpy().tobytes() == make_sample(index).rows.tobytes()


def test_a_missing_share_is_an_error_not_a_smaller_set(halves):
    shutil.rmtree(halves / "shard-1-of-2")
    with pytest.raises(MissingError, match="shard-1-of-2"):
        open_dataset(halves)
    assert len(open_dataset(halves / "shard-0-of-2")) == 5


def test_shares_of_something_else_are_refused(halves):
    shutil.rmtree(halves / "shard-1-of-2")
    write_dataset(halves / "shard-1-of-2", [1], manifest=make_manifest(revision="other"))
    with pytest.raises(ForeignError, match="revision"):
        open_dataset(halves)
    write_dataset(halves / "shard-0-of-3", [0])
    with pytest.raises(ForeignError, match="splits into 2 and 3"):
        open_dataset(halves)


def test_a_sample_in_two_shares_is_an_error(halves):
    shutil.rmtree(halves / "shard-1-of-2")
    options = {"max_model_len": 64, "field": None, "shard": "1/2"}
    write_dataset(halves / "shard-1-of-2", [0], manifest=make_manifest(options=options))
    with pytest.raises(CorruptError, match="twice"):
        open_dataset(halves)
