import json

import pytest
import torch
from dataset_cases import assert_holds, make_manifest, make_sample
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from layertap import LLM
from layertap.datasets.extraction import RunOptions, extract_dataset
from layertap.datasets.inputs import open_input
from layertap.datasets.plan import make_plan
from layertap.datasets.reader import open_dataset
from layertap.datasets.resume import locked_folder, prepare_folder
from layertap.datasets.sharing import WINDOW, hosts_of
from layertap.datasets.verify import verify_parts
from layertap.datasets.writer import DatasetWriter, Sample, ShardOptions
from layertap.errors import CorruptError, OptionError
from layertap.testing import oracle, zoo

TURNS = [
    {"role": role, "content": f"{role} says {number}. " * (number + 1)}
    for number in range(3)
    for role in ("user", "assistant")
]
ROWS = [
    {"messages": TURNS[:2]},
    {"prompt_token_ids": [9, 10, 11]},
    {"messages": TURNS},
    {"messages": TURNS[:4]},
    {"prompt_token_ids": [9, 10, 11]},
    {"prompt_token_ids": [9, 10, 12, 13]},
    {"messages": [{"role": "user", "content": "something else"}]},
]
SHARED = {0, 1, 3}  # of the two equal ones, either could be
QUICK = ShardOptions(fsync=False)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12))
def test_a_host_begins_with_its_guest_and_only_what_begins_no_other_is_a_host(sequences):
    hosts = hosts_of(sequences)
    for number, host in enumerate(hosts):
        mine = sequences[number]
        longer = [one for other, one in enumerate(sequences) if other != number and one[: len(mine)] == mine]
        if host is None:
            assert all(one == mine for one in longer)
        else:
            assert hosts[host] is None
            assert sequences[host][: len(mine)] == mine
    # one of equals is enough
    kept = [tuple(one) for one, host in zip(sequences, hosts, strict=True) if host is None]
    assert len(kept) == len(set(kept))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return zoo.save("llama", tmp_path_factory.mktemp("zoo") / "llama")


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, dtype="float32", device="cpu", max_model_len=400) as llm:
        yield llm


@pytest.fixture
def make_input(tmp_path):
    def make(rows):
        path = tmp_path / "in.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return open_input(path)

    return make


def options(**changes: object):
    return RunOptions(**{"layers": [0, 2, -1], "shards": QUICK, "share_prefixes": True, **changes})


def test_beginnings_are_stored_once_and_read_like_any_sample(llm, checkpoint, make_input, folder, tmp_path):
    report = extract_dataset(llm, make_input(ROWS), folder, options())
    extract_dataset(llm, make_input(ROWS), tmp_path / "apart", options(share_prefixes=False))
    shared, apart = open_dataset(folder, verify=True), open_dataset(tmp_path / "apart")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    assert len(shared) == len(apart) == len(ROWS)
    for one, other in zip(shared, apart, strict=True):
        assert (one["index"], one["prompt_len"]) == (other["index"], other["prompt_len"])
        assert one["token_ids"].tolist() == other["token_ids"].tolist()
        assert (one["loss_mask"] is None) == (other["loss_mask"] is None)
        if one["loss_mask"] is not None:
            assert torch.equal(one["loss_mask"], other["loss_mask"])
        expected = oracle.hidden_states(model, one["token_ids"].tolist(), [0, 2, model.config.num_hidden_layers])
        torch.testing.assert_close(one["hidden_states"], expected, rtol=1e-4, atol=1e-5)
    places = [[row for span in shared.entry(i).spans for row in range(*span)] for i in range(len(ROWS))]
    assert places[2][: len(places[0])] == places[0]
    assert places[2][: len(places[3])] == places[3]
    assert places[1] == places[4]
    assert sorted({row for rows in places for row in rows}) == list(
        range(sum(map(len, places)) - report.num_shared_tokens)
    )
    lengths = [len(item["token_ids"]) for item in shared]
    assert report.num_shared >= 3
    assert report.num_shared_tokens >= sum(lengths[i] for i in SHARED)
    assert (report.num_samples, report.num_tokens) == (len(ROWS), sum(lengths))
    row_bytes = report.num_bytes // (sum(lengths) - report.num_shared_tokens)
    assert row_bytes == 3 * shared.hidden_size * 4
    assert all(one.error is None for one in verify_parts(folder, shared.manifest))
    again = extract_dataset(llm, make_input(ROWS), folder, options())
    assert (again.num_skipped, again.damaged) == (len(ROWS), [])


def test_groups_of_answers_are_computed_and_stored_once(llm, checkpoint, make_input, folder, monkeypatch):
    from layertap.engines.transformers.passes import Passes
    from layertap.engines.transformers.trees import Tree

    run: list[int] = []
    real = Passes.run

    def counting(self, way, sequences, *rest):
        run.append(Tree.of(sequences).num_rows if way == "shared" else sum(map(len, sequences)))
        real(self, way, sequences, *rest)

    system = list(range(9, 49))
    rows = [
        {"prompt_token_ids": [*system, 60 + group, *range(20, 50), *range(70 + 9 * answer, 78 + 9 * answer)]}
        for answer in range(4)
        for group in range(3)
    ]
    unique = {tuple(row["prompt_token_ids"][:end]) for row in rows for end in range(1, 80)}
    with monkeypatch.context() as patch:
        patch.setattr(Passes, "run", counting)
        report = extract_dataset(llm, make_input(rows), folder, options(save_dtype="bfloat16"))
    assert run[-1] == len(unique)  # what ran before are the self-test and the trial
    assert report.num_tokens - report.num_shared_tokens == len(unique)
    found = open_dataset(folder, verify=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for item, row in zip(found, rows, strict=True):
        assert item["token_ids"].tolist() == row["prompt_token_ids"]
        expected = oracle.hidden_states(model, row["prompt_token_ids"], [0, 2, model.config.num_hidden_layers])
        torch.testing.assert_close(item["hidden_states"], expected.bfloat16(), rtol=2e-2, atol=1e-3)


def test_only_records_near_one_another_are_compared(llm, make_input, folder):
    rows = [
        {"prompt_token_ids": [9, 10]},
        *({"prompt_token_ids": [20, 30 + n % 200, 9 + n // 200]} for n in range(WINDOW)),
    ]
    report = extract_dataset(llm, make_input([*rows, {"prompt_token_ids": [9, 10, 11]}]), folder, options(layers=[0]))
    assert report.num_shared == 0
    assert len(open_dataset(folder, verify=True)) == WINDOW + 2


def test_a_flipped_bit_in_shared_rows_is_found(llm, make_input, folder):
    extract_dataset(llm, make_input(ROWS), folder, options())
    ds = open_dataset(folder)
    path = folder / ds.entry(0).file
    data = bytearray(path.read_bytes())
    position = data.index(ds.raw(2)[0][3].tobytes())
    data[position] ^= 1
    path.write_bytes(data)
    for place in (0, 2, 3):
        with pytest.raises(CorruptError):
            open_dataset(folder, verify=True)[place]
    report = extract_dataset(llm, make_input(ROWS), folder, options())
    assert len(report.damaged) == 1
    assert len(open_dataset(folder, verify=True)) == len(ROWS)


def test_a_beginning_goes_alone_where_the_longer_one_fails(llm, make_input, folder, monkeypatch):
    from layertap.engines.transformers.passes import Passes

    real = Passes.run

    def failing(self, way, sequences, *rest):
        if any(len(sequence) == 5 for sequence in sequences):
            raise RuntimeError("no five")
        return real(self, way, sequences, *rest)

    monkeypatch.setattr(Passes, "run", failing)
    rows = [{"prompt_token_ids": [9, 10, 11]}, {"prompt_token_ids": [9, 10, 11, 12, 13]}]
    report = extract_dataset(llm, make_input(rows), folder, options())
    assert (report.num_samples, report.num_failed) == (1, 1)
    assert open_dataset(folder, verify=True).indices.tolist() == [0]


def test_models_whose_rows_see_what_is_behind_them_or_the_length_are_refused(tmp_path, make_input, monkeypatch):
    config = json.loads((zoo.save("llama", tmp_path / "dynamic") / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "dynamic" / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path / "dynamic", dtype="float32", device="cpu") as llm, pytest.raises(OptionError, match="dynamic"):
        extract_dataset(llm, make_input(ROWS), tmp_path / "states", options())
    with LLM(zoo.save("llama", tmp_path / "llama"), dtype="float32", device="cpu") as llm:
        from layertap.engines.transformers.passes import Passes

        real = Passes.run

        def longer_is_larger(self, way, sequences, wanted, layers, rows):
            real(self, way, sequences, wanted, layers, rows)
            rows *= 1 + max(map(len, sequences)) / 100

        monkeypatch.setattr(Passes, "run", longer_is_larger)
        with pytest.raises(OptionError, match="depend on the tokens behind them"):
            extract_dataset(llm, make_input(ROWS), tmp_path / "other", options())


def test_options_that_do_not_go_together_are_refused():
    for wrong in ({"layout": "files"}, {"positions": "trained"}):
        with pytest.raises(OptionError, match="share_prefixes"):
            options(**wrong)


def test_a_set_that_shares_is_not_mixed_with_one_that_does_not(llm, make_input, folder):
    extract_dataset(llm, make_input(ROWS), folder, options())
    with pytest.raises(OptionError, match=r"options\.share_prefixes: the data set has true, this run none"):
        extract_dataset(llm, make_input(ROWS), folder, options(share_prefixes=False))


def test_a_plan_says_what_sharing_would_save(checkpoint, make_input, tmp_path):
    plan = make_plan(str(checkpoint), make_input(ROWS), options(share_prefixes=False), tmp_path, device="cpu")
    (saved,) = [size for option, size in plan.savings if option.startswith("--share-prefixes")]
    assert saved < plan.disk_bytes
    alone = make_plan(str(checkpoint), make_input(ROWS[4:]), options(share_prefixes=False), tmp_path, device="cpu")
    assert not [option for option, _ in alone.savings if option.startswith("--share-prefixes")]


def test_a_full_disk_takes_back_a_sample_with_its_beginnings(folder, monkeypatch):
    from layertap.datasets import writer as writer_module
    from layertap.errors import StoreFullError

    host = make_sample(1, 9)
    guest = Sample(
        index=2,
        source_hash=f"{2:032x}",
        rows=host.rows[:4],
        token_ids=host.token_ids[:4],
        prompt_tokens=4,
        finish_reason="prefill",
    )
    real, calls = writer_module.write_synced, iter(range(100))

    def full(*given: object) -> None:
        if next(calls) < 2:
            raise OSError(28, "No space left on device")
        real(*given)

    with locked_folder(folder):
        manifest = prepare_folder(folder, make_manifest(options={"share_prefixes": True})).manifest
        writer = DatasetWriter(folder, manifest, QUICK)
        writer.add(make_sample(0))
        assert (writer.add(host), writer.add(guest)) == (0, 4)
        monkeypatch.setattr(writer_module, "write_synced", full)
        with pytest.raises(StoreFullError, match="2 samples of the last shard were dropped"):
            writer.close()
    assert_holds(folder, [0])
