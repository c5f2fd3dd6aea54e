"""Samples from a real server process, beside what extraction makes of the same input."""

import json
from itertools import islice

import pytest
import torch
from serve_process import serving
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from layertap import LLM, AsyncLLM
from layertap.client import HiddenStatesClient
from layertap.datasets import stream
from layertap.datasets.extraction import RunOptions, extract_dataset
from layertap.datasets.inputs import open_input
from layertap.datasets.reader import open_dataset
from layertap.errors import HiddenStatesError, OptionError
from layertap.serving.server import run_background
from layertap.serving.settings import ServerSettings
from layertap.testing import oracle, zoo

LAYERS = [2, 0, -1]
COUNT = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return zoo.save("llama", tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def server(checkpoint, storage):
    with serving(str(checkpoint), "--layers", "2,0,-1", "--shared-storage-path", str(storage), "--allow-delete") as up:
        yield up[0]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("input") / "chats.jsonl"
    with path.open("w") as file:
        for number in range(COUNT):
            messages = [{"role": "user", "content": f"What is {number}?"}]
            messages.append({"role": "assistant", "content": "It is " + "very " * (number % 4) + "odd."})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


class Counting(HiddenStatesClient):
    """Counts what is asked for."""

    asked = 0

    def complete(self, prompt, **body):
        type(self).asked += 1
        return super().complete(prompt, **body)


def rows_left(storage):
    return [path.name for path in storage.rglob("*") if path.is_file() and path.suffix in (".safetensors", ".error")]


def test_items_are_those_that_extraction_makes(server, storage, checkpoint, chats, tmp_path):
    with LLM(checkpoint, dtype="float32", device="cpu") as llm:
        extract_dataset(llm, open_input(chats), tmp_path / "states", RunOptions(layers=LAYERS))
    expected = open_dataset(tmp_path / "states")
    items = list(stream(server, chats, tokenizer=str(checkpoint), max_ahead=3))
    assert [item["index"] for item in items] == list(range(COUNT))
    for item, ours in zip(items, expected, strict=True):
        assert item.keys() == ours.keys()
        assert item["prompt_len"] == ours["prompt_len"]
        for name in ("token_ids", "loss_mask", "positions"):
            assert torch.equal(item[name], ours[name]), name
            assert item[name].dtype == ours[name].dtype
        torch.testing.assert_close(item["hidden_states"], ours["hidden_states"], rtol=1e-4, atol=1e-5)
    # used and deleted
    assert not rows_left(storage)


def test_fp8_rows_come_with_the_scales_that_make_them_numbers(server, checkpoint, chats):
    exact = stream(server, chats, tokenizer=str(checkpoint))
    short = stream(server, chats, tokenizer=str(checkpoint), save_dtype="fp8_e4m3")
    for item, small in zip(islice(exact, 2), islice(short, 2), strict=True):
        assert small["hidden_states"].dtype == torch.float8_e4m3fn
        numbers = small["hidden_states"].float() * small["hidden_states_scale"][:, :, None]
        torch.testing.assert_close(numbers, item["hidden_states"], rtol=0.07, atol=0.01)


def test_no_more_is_asked_for_than_may_be_ahead_and_leaving_early_leaves_nothing(server, storage, checkpoint, chats):
    Counting.asked = 0
    samples = stream(server, chats, tokenizer=str(checkpoint), max_ahead=3, connect=lambda: Counting(server))
    left = iter(samples)
    for taken in range(1, 6):
        next(left)
        # the one that was taken last is still in use
        assert Counting.asked <= taken - 1 + 3
        assert len(rows_left(storage)) <= 3
    left.close()
    assert Counting.asked <= 7
    assert not rows_left(storage)
    # another iteration starts again
    assert next(iter(samples))["index"] == 0


def test_failures_end_the_stream_or_are_told(server, checkpoint, tmp_path):
    path = tmp_path / "in.jsonl"
    rows = [
        '{"prompt": "fine"}',
        '{"prompt": "broken"',
        json.dumps({"prompt": "long " * 200}),
        '{"prompt": "also fine"}',
    ]
    path.write_text("\n".join(rows) + "\n")
    got = []
    with pytest.raises(HiddenStatesError, match="line 2.*broken JSON"):
        got.extend(stream(server, path, tokenizer=str(checkpoint)))
    samples = stream(server, path, tokenizer=str(checkpoint), max_failures=2)
    assert [item["index"] for item in samples] == [0, 3]
    assert [index for index, _ in samples.failures] == [1, 2]
    assert "line 3" in samples.failures[1][1]
    with pytest.raises(HiddenStatesError, match="2 of the records failed, 1 may"):
        list(stream(server, path, tokenizer=str(checkpoint), max_failures=1))


def test_a_server_that_refuses_or_is_gone_is_an_error(server, checkpoint):
    rows = [{"prompt_token_ids": [9, 10, 11]}]
    with pytest.raises(HiddenStatesError, match="layers"):
        list(stream(server, rows, layers=[99]))
    with pytest.raises(Exception, match=r"(?i)connect"):
        list(stream("http://127.0.0.1:9", rows, connect=lambda: HiddenStatesClient("http://127.0.0.1:9", retries=0)))


def test_a_server_that_keeps_its_files_is_refused_and_one_that_takes_none_is_asked_to(checkpoint, tmp_path):
    config = {"kv_connector": "HiddenStatesConnector"}
    extra = {"shared_storage_path": str(tmp_path), "min_free_bytes": 0, "capture_by_default": False}
    llm = AsyncLLM(str(checkpoint), layers=[0], kv_transfer_config={**config, "kv_connector_extra_config": extra})
    rows = [{"prompt_token_ids": [9, 10]}] * 3
    try:
        with run_background(llm.front, ServerSettings()) as up, pytest.raises(OptionError, match="--allow-delete"):
            list(stream(up.url, rows, max_failures=9))
        # rows are asked for also where a server takes none by itself
        with run_background(llm.front, ServerSettings(allow_delete=True)) as up:
            assert len(list(stream(up.url, rows))) == 3
    finally:
        llm.close()


def test_answers_of_the_model_are_what_is_trained(server, checkpoint):
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    rows = [{"prompt_token_ids": [9, 10, 11, 12 + number]} for number in range(3)]
    items = list(stream(server, rows, layers=[2], max_tokens=5, sampling={"temperature": 0, "ignore_eos": True}))
    for number, item in enumerate(items):
        ids = item["token_ids"].tolist()
        assert ids[:4] == [9, 10, 11, 12 + number]
        with torch.no_grad():
            said = plain.generate(
                torch.tensor([ids[:4]]), max_new_tokens=5, min_new_tokens=5, do_sample=False, eos_token_id=None
            )
        assert ids == said[0, :-1].tolist()  # the last token was never an input
        assert item["loss_mask"].tolist() == [False] * 4 + [True] * 4
        torch.testing.assert_close(item["hidden_states"], oracle.hidden_states(plain, ids, [2]), rtol=1e-4, atol=1e-5)


def test_workers_and_ranks_share_the_input(server, checkpoint, chats):
    found = []
    for rank in range(2):
        samples = stream(server, chats, tokenizer=str(checkpoint), max_ahead=2, rank=rank, num_ranks=2)
        loader = DataLoader(samples, batch_size=None, num_workers=2 if rank else 0)
        mine = sorted(item["index"] for item in loader)
        assert mine == list(range(rank, COUNT, 2))
        found += mine
    assert sorted(found) == list(range(COUNT))


def test_endless_rows_are_taken_as_they_come(server):
    def forever():
        number = 0
        while True:
            number += 1
            yield {"prompt_token_ids": [9, 10 + number % 200]}

    samples = stream(server, forever(), max_ahead=2)
    assert [item["token_ids"].tolist() for item in islice(iter(samples), 3)] == [[9, 11], [9, 12], [9, 13]]


def test_options_that_cannot_be_are_refused():
    for options, reason in (
        ({"max_ahead": 0}, "max_ahead"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"sampling": {"seed": 1}}, "give max_tokens"),
        ({"rank": 2}, "both or none"),
        ({"rank": 2, "num_ranks": 2}, "not one of 2"),
    ):
        with pytest.raises(OptionError, match=reason):
            stream("http://127.0.0.1:9", [], **options)
