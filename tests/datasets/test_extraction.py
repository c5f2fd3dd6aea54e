import json
import pickle
from datetime import date

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from layertap import LLM
from layertap.datasets.extraction import RunOptions, extract_dataset, make_manifest
from layertap.datasets.inputs import open_input
from layertap.datasets.reader import open_dataset
from layertap.datasets.tokenizing import trained_rows
from layertap.datasets.writer import ShardOptions
from layertap.errors import LayerError, OptionError, StoreFullError
from layertap.testing import oracle, zoo

LAYERS = (2, 0, -1)
CHAT = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "because."}]
SMALL = ShardOptions(shard_bytes=20_000, fsync=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return zoo.save("llama", tmp_path_factory.mktemp("zoo") / "llama")


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, dtype="float32", device="cpu", max_model_len=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(checkpoint):
    """A function: rows of token ids from plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    layers = [2, 0, model.config.num_hidden_layers]
    return lambda ids: oracle.hidden_states(model, ids, layers)


@pytest.fixture
def make_input(tmp_path):
    def make(rows, name="in.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return open_input(path)

    return make


def many(count):
    return [{"prompt": f"prompt number {number} " * (1 + number % 3)} for number in range(count)]


def options(**changes: object):
    return RunOptions(**{"layers": LAYERS, "shards": SMALL, **changes})


def assert_right(folder, indices, reference):
    ds = open_dataset(folder, verify=True)
    assert ds.indices.tolist() == list(indices)
    for item in ds:
        torch.testing.assert_close(
            item["hidden_states"].float(), reference(item["token_ids"].tolist()), rtol=1e-4, atol=1e-5
        )
    return ds


def test_every_kind_of_prompt_becomes_its_rows_and_the_failed_ones_are_told(
    llm, checkpoint, reference, make_input, folder
):
    source = make_input(
        [
            {"prompt": "some text", "id": "first"},
            {"messages": CHAT},
            '{"prompt": "broken"',
            {"prompt_token_ids": [9, 10, 11, 12]},
            {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "because."}]},
            {"prompt": "too long " * 50, "id": "long"},
            {"prompt_token_ids": [9, 10**6]},
            {"prompt": "the last"},
            {"prompt": "", "id": 7},
        ]
    )
    report = extract_dataset(llm, source, folder, options())
    ds = assert_right(folder, [0, 1, 3, 4, 7], reference)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    chat = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert [item["token_ids"].tolist() for item in ds] == [
        tokenizer("some text")["input_ids"],
        chat,
        [9, 10, 11, 12],
        chat,
        tokenizer("the last")["input_ids"],
    ]
    assert ds.entry(0).sample_id == "first"
    assert (report.num_samples, report.num_failed, report.num_skipped) == (5, 4, 0)
    assert [one.sample_id for one in ds.failures] == [None, "long", None, "7"]
    assert report.num_tokens == ds.num_tokens
    reasons = [reason for _, reason in report.failures]
    assert all(f"in.jsonl line {line}" in reason for line, reason in zip((3, 6, 7, 9), reasons, strict=True))
    assert [part in reason for part, reason in zip(("JSON", "64", "1000000", "empty"), reasons, strict=True)] == [
        True
    ] * 4
    assert [(one.index, one.reason) for one in ds.failures] == list(zip((2, 5, 6, 8), reasons, strict=True))


def test_records_that_nobody_would_think_of_fail_alone(llm, reference, make_input, folder, tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    odd = [
        {"messages": [*CHAT, {"role": "assistant", "content": "x", "tool_calls": "f()"}]},
        {"messages": [*CHAT, {"role": "assistant", "content": "x", "tool_calls": {"name": "f"}}]},
        {"messages": [{"role": "user\ud800", "content": "x"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "\udc00", "arguments": {}}}]}]},
        {"messages": CHAT, "tools": [{"name": "\ud800"}]},
        {"messages": [{"role": "assistant", "content": [["x"]]}]},
    ]
    good = [{"prompt": "a", "id": "half a pair \ud800"}, {"messages": [*CHAT, {**CHAT[1], "tool_calls": [call, call]}]}]
    source = make_input([*odd, *good])
    named = tmp_path / "in \udcff.jsonl"
    named.write_bytes(source.path.read_bytes())
    report = extract_dataset(llm, open_input(named), folder, options())
    assert (report.num_failed, report.num_samples) == (len(odd), len(good))
    ds = assert_right(folder, range(len(odd), len(odd) + len(good)), reference)
    assert ds.entry(0).sample_id == "half a pair \\ud800"
    assert all("in \\udcff.jsonl line" in one.reason for one in ds.failures)
    assert extract_dataset(llm, open_input(named), folder, options()).num_skipped == len(good)


@pytest.mark.parametrize("layout", ["shards", "files"])
def test_a_stopped_run_continues_and_ends_like_one_that_never_stopped(llm, reference, make_input, folder, layout):
    source = make_input(many(30))
    asked = iter(range(1000))
    stopped = extract_dataset(llm, source, folder, options(layout=layout), should_stop=lambda: next(asked) >= 11)
    assert stopped.stopped
    assert 0 < stopped.num_samples < 30
    report = extract_dataset(llm, source, folder, options(layout=layout))
    assert not report.stopped
    assert report.num_skipped == stopped.num_samples
    assert report.num_samples == 30 - stopped.num_samples
    assert_right(folder, range(30), reference)
    again = extract_dataset(llm, source, folder, options(layout=layout))
    assert (again.num_skipped, again.num_samples) == (30, 0)


def test_a_run_with_another_limit_goes_on_in_the_same_set(llm, reference, make_input, folder):
    path = make_input(many(12)).path
    extract_dataset(llm, open_input(path, limit=4), folder, options())
    extract_dataset(llm, open_input(path, limit=9), folder, options())
    assert_right(folder, range(9), reference)
    extract_dataset(llm, open_input(path), folder, options())
    assert_right(folder, range(12), reference)


def test_another_option_or_input_is_refused_and_the_set_stays_as_it_was(llm, reference, make_input, folder):
    extract_dataset(llm, make_input(many(4)), folder, options())
    with pytest.raises(OptionError, match=r"layers: the data set has \[2, 0, \d+\], this run \[1\]"):
        extract_dataset(llm, make_input(many(4)), folder, options(layers=[1]))
    with pytest.raises(OptionError, match='save_dtype: the data set has "float32", this run "bfloat16"'):
        extract_dataset(llm, make_input(many(4)), folder, options(save_dtype="bfloat16"))
    with pytest.raises(OptionError, match="options.add_generation_prompt: the data set has false, this run true"):
        extract_dataset(llm, make_input(many(4)), folder, options(add_generation_prompt=True))
    with pytest.raises(OptionError, match="line 2: the input has changed: sample 1"):
        extract_dataset(llm, make_input([*many(1), {"prompt": "other"}, *many(9)]), folder, options())
    with pytest.raises(OptionError, match="input: the data set has"):
        extract_dataset(llm, make_input(many(4), "other.jsonl"), folder, options())
    assert_right(folder, range(4), reference)


def test_another_model_is_noticed_by_its_files_and_a_copy_is_the_same(llm, make_input, folder, tmp_path, checkpoint):
    source = make_input(many(2))
    extract_dataset(llm, source, folder, options())
    copy = tmp_path / "llama"
    other = zoo.save("llama", tmp_path / "other" / "llama", seed=1)
    copy.symlink_to(checkpoint)
    with LLM(copy, dtype="float32", device="cpu") as same:
        assert extract_dataset(same, source, folder, options()).num_skipped == 2
    with LLM(other, dtype="float32", device="cpu") as different, pytest.raises(OptionError, match="model_fingerprint"):
        extract_dataset(different, source, folder, options())


def test_damage_is_reported_and_computed_again(llm, reference, make_input, folder):
    source = make_input(many(6))
    extract_dataset(llm, source, folder, options())
    shard = folder / open_dataset(folder).entry(0).file
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    report = extract_dataset(llm, source, folder, options())
    assert len(report.damaged) == 1
    assert report.num_samples > 0
    assert_right(folder, range(6), reference)


def test_rows_are_saved_in_the_dtype_asked_for(llm, make_input, folder, reference):
    extract_dataset(llm, make_input(many(2)), folder, options(save_dtype="bfloat16"))
    item = open_dataset(folder, verify=True)[0]
    assert item["hidden_states"].dtype == torch.bfloat16
    expected = reference(item["token_ids"].tolist())
    assert torch.linalg.norm(item["hidden_states"].float() - expected) < 3e-2 * torch.linalg.norm(expected)


def test_fp8_rows_are_the_quantized_rows_of_a_plain_run(llm, make_input, folder, tmp_path):
    extract_dataset(llm, make_input(many(3)), tmp_path / "plain", options())
    extract_dataset(llm, make_input(many(3)), folder, options(save_dtype="fp8_e4m3"))
    extract_dataset(llm, make_input(many(5)), folder, options(save_dtype="fp8_e4m3"))  # and goes on
    ds, plain = open_dataset(folder, verify=True), open_dataset(tmp_path / "plain")
    assert (len(ds), ds.dtype, ds.manifest.format_version, plain.manifest.format_version) == (5, "fp8_e4m3", 2, 1)
    read = open_dataset(folder, dtype="float32")
    for item, numbers, exact in zip(ds[:3], read[:3], plain, strict=True):
        rows = exact["hidden_states"]
        expected_scale = rows.abs().amax(-1) / torch.tensor(448.0)
        torch.testing.assert_close(item["hidden_states_scale"], expected_scale, rtol=1e-4, atol=0)
        assert item["hidden_states"].dtype == torch.float8_e4m3fn
        assert torch.equal(
            numbers["hidden_states"], item["hidden_states"].float() * item["hidden_states_scale"][..., None]
        )
        assert "hidden_states_scale" not in numbers
        assert ((numbers["hidden_states"] - rows).norm(dim=-1) <= rows.norm(dim=-1) / 16).all()
    ds.verify()
    assert pickle.loads(pickle.dumps(read))[2]["hidden_states"].dtype == torch.float32


def test_a_failing_write_ends_the_run_and_keeps_what_is_complete(llm, reference, make_input, folder, monkeypatch):
    import os

    real, calls = os.pwrite, iter(range(1000))

    def full(*args: object) -> int:
        if next(calls) == 20:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreFullError, match="run the same command again to continue"):
        extract_dataset(llm, make_input(many(30)), folder, options())
    monkeypatch.undo()
    done = open_dataset(folder).indices.tolist()
    assert 0 < len(done) < 30
    report = extract_dataset(llm, make_input(many(30)), folder, options())
    assert report.num_skipped == len(done)
    assert_right(folder, range(30), reference)


def test_options_are_checked_before_anything_runs(llm, make_input, folder):
    for wrong in ({"layout": "heap"}, {"save_dtype": "int8"}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            options(**wrong)
    with pytest.raises(LayerError, match="layer 99"):
        extract_dataset(llm, make_input(many(1)), folder, options(layers=[99]))
    assert not folder.exists()


def test_the_manifest_says_what_the_rows_depend_on(llm, make_input, checkpoint):
    manifest = make_manifest(llm, make_input([]), options())
    rows = manifest.rows
    assert (rows.model, rows.save_dtype, rows.engine) == (str(checkpoint), "float32", "transformers")
    assert rows.layers == (2, 0, rows.num_layers)
    for digest in (rows.model_fingerprint, rows.tokenizer_hash, rows.chat_template_hash):
        assert digest is not None
        assert len(digest) == 32
    assert manifest.input_name == "in.jsonl"


def test_samples_of_a_set_are_plain_safetensors_for_everybody_else(llm, make_input, folder):
    from safetensors.numpy import load_file

    extract_dataset(llm, make_input(many(3)), folder, options(shards=ShardOptions(fsync=False)))
    ds = open_dataset(folder)
    (shard,) = ds.files
    tensors = load_file(folder / shard)
    entry = ds.entry(1)
    assert np.array_equal(
        tensors["hidden_states"][entry.row : entry.row + entry.tokens], ds[1]["hidden_states"].numpy()
    )


TALK = [
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "because."},
    {"role": "user", "content": "really?"},
    {"role": "assistant", "content": "yes."},
]


def test_chats_have_the_mask_of_what_the_model_would_have_said(llm, make_input, folder):
    extract_dataset(llm, make_input([{"messages": TALK}, {"prompt": "text"}]), folder, options())
    ds = open_dataset(folder)
    item, text = ds
    tokenizer = llm.get_tokenizer()
    said = [tokenizer.decode(item["token_ids"][a:b]) for a, b in ds.entry(0).loss_mask]
    assert said == ["because.<|end|>", "yes.<|end|>"]
    assert item["loss_mask"].dtype == torch.bool
    assert tokenizer.decode(item["token_ids"][item["loss_mask"]]) == "".join(said)
    assert ds.num_trained_tokens == int(item["loss_mask"].sum())
    assert text["loss_mask"] is None
    assert item["positions"].tolist() == list(range(len(item["token_ids"])))
    without = folder.with_name("without")
    extract_dataset(llm, make_input([{"messages": TALK}]), without, options(loss_mask=False))
    assert open_dataset(without)[0]["loss_mask"] is None


def test_trained_positions_are_the_rows_of_the_whole_run_without_the_others(llm, make_input, folder):
    source = make_input([{"messages": TALK}, {"prompt": "text"}, {"messages": TALK[:1]}])
    report = extract_dataset(llm, source, folder, options(positions="trained"))
    assert [("loss mask" in reason, "no turn" in reason) for _, reason in report.failures] == [
        (True, False),
        (False, True),
    ]
    extract_dataset(llm, make_input([{"messages": TALK}]), folder.with_name("whole"), options())
    (item,), whole = open_dataset(folder, verify=True), open_dataset(folder.with_name("whole"))[0]
    trained = whole["loss_mask"].nonzero().flatten().tolist()
    kept = sorted({*trained, *(position - 1 for position in trained)})
    assert item["positions"].tolist() == kept
    assert item["prompt_len"] == len(whole["token_ids"])
    assert torch.equal(item["hidden_states"], whole["hidden_states"][kept])
    assert torch.equal(item["token_ids"], whole["token_ids"][kept])
    assert torch.equal(item["loss_mask"], whole["loss_mask"][kept])


@pytest.mark.parametrize(
    ("mask", "kept", "moved"),
    [
        (((3, 5),), ((2, 5),), ((1, 3),)),
        (((0, 2),), ((0, 2),), ((0, 2),)),
        (((1, 2), (2, 4)), ((0, 4),), ((1, 2), (2, 4))),
        (((1, 2), (3, 4)), ((0, 4),), ((1, 2), (3, 4))),
        (((1, 2), (9, 11)), ((0, 2), (8, 11)), ((1, 2), (3, 5))),
    ],
)
def test_kept_positions_of_a_mask(mask, kept, moved):
    assert trained_rows(mask) == (kept, moved)


def test_a_template_that_prints_the_date_gives_the_same_tokens_on_every_day(llm, make_input, folder, monkeypatch):
    dated = "{{ strftime_now('%d %b %Y') }}" + llm.get_tokenizer().chat_template
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", dated)
    first = options(template_date=date(2001, 2, 3))
    extract_dataset(llm, make_input([{"messages": CHAT}]), folder, first)
    # another day, the same set: the date is the set's, not today's
    extract_dataset(llm, make_input([{"messages": CHAT}, {"messages": TALK}]), folder, options())
    texts = [llm.get_tokenizer().decode(item["token_ids"]) for item in open_dataset(folder)]
    assert [text.startswith("03 Feb 2001") for text in texts] == [True, True]
    with pytest.raises(OptionError, match="options.template_date"):
        extract_dataset(llm, make_input([{"messages": CHAT}]), folder, options(template_date=date(2001, 2, 4)))
    extract_dataset(llm, make_input([{"messages": CHAT}]), folder.with_name("today"), options())
    today = open_dataset(folder.with_name("today"))
    text = llm.get_tokenizer().decode(today[0]["token_ids"])
    assert text.startswith(date.fromisoformat(today.manifest.rows.options["template_date"]).strftime("%d %b %Y"))


def test_variables_of_the_template_are_the_sets_and_others_are_refused(llm, make_input, folder, monkeypatch):
    tokenizer = llm.get_tokenizer()
    template = (
        "{% if enable_thinking is defined and not enable_thinking %}no thoughts {% endif %}" + tokenizer.chat_template
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    given = options(chat_template_kwargs={"enable_thinking": False})
    extract_dataset(llm, make_input([{"messages": CHAT}]), folder, given)
    extract_dataset(llm, make_input([{"messages": CHAT}, {"messages": TALK}]), folder, given)
    dataset = open_dataset(folder)
    for item, chat in zip(dataset, (CHAT, TALK), strict=True):
        expected = tokenizer.apply_chat_template(chat, tokenize=False, enable_thinking=False)
        assert expected.startswith("no thoughts")
        assert tokenizer.decode(item["token_ids"]) == expected
        assert item["loss_mask"].any()
    for others in (None, {"enable_thinking": True}):
        with pytest.raises(OptionError, match="options.chat_template_kwargs"):
            extract_dataset(llm, make_input([{"messages": CHAT}]), folder, options(chat_template_kwargs=others))
    extract_dataset(
        llm, make_input([{"messages": CHAT}]), folder.with_name("without"), options(chat_template_kwargs={})
    )
    extract_dataset(llm, make_input([{"messages": CHAT}]), folder.with_name("without"), options())


@pytest.mark.parametrize(
    "given", [{"tools": []}, {"tokenize": True}, {1: 2}, [1], {"x": object()}, {"x": float("nan")}]
)
def test_what_can_be_no_variable_of_a_template_is_refused(given):
    with pytest.raises(OptionError, match="chat_template_kwargs"):
        options(chat_template_kwargs=given)
