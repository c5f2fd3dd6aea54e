"""The model's own answers against plain transformers, turn by turn."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from layertap import LLM
from layertap.cli.app import make_app
from layertap.datasets.conversations import ChatPrompt
from layertap.datasets.extraction import RunOptions, extract_dataset
from layertap.datasets.inputs import InputRecord, open_input
from layertap.datasets.reader import open_dataset
from layertap.datasets.regenerating import RegenerateOptions, _open, _shown
from layertap.datasets.writer import ShardOptions
from layertap.errors import OptionError
from layertap.testing import oracle, zoo

USER, ASSISTANT = "user", "assistant"
GREEDY = RegenerateOptions(temperature=0, max_tokens=6)
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return zoo.save("llama", tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, dtype="float32", device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture
def make_input(tmp_path):
    def make(rows, name="in.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return open_input(path)

    return make


def chat(*turns):
    roles = (USER, ASSISTANT) * len(turns)
    return {"messages": [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]}


def run(llm, source, folder, regenerate=GREEDY, should_stop=lambda: False, **more):
    options = RunOptions(layers=[0, 2, -1], regenerate=regenerate, shards=ShardOptions(fsync=False), **more)
    return extract_dataset(llm, source, folder, options, should_stop=should_stop)


def greedy(plain, ids, max_tokens=6):
    """Plain argmax, one forward a token."""
    generated = []
    while len(generated) < max_tokens and generated[-1:] != [plain.config.eos_token_id]:
        with torch.no_grad():
            logits = plain(torch.tensor([[*ids, *generated]])).logits[0, -1]
        generated.append(int(logits.argmax()))
    return generated


def test_every_turn_is_answered_anew_and_the_rows_are_of_what_was_said(llm, plain, make_input, folder):
    rows = [{"prompt": "once upon"}, chat("why?", "never said"), chat("a?", "old", "b?", "older", "c?")]
    report = run(llm, make_input(rows), folder)
    assert (report.num_samples, report.num_failed) == (3, 0)
    ds = open_dataset(folder, verify=True)
    tokenizer = llm.get_tokenizer()
    answers = []
    prompt = tokenizer("once upon")["input_ids"]
    expected = [(prompt, greedy(plain, prompt))]
    for questions in (("why?",), ("a?", "b?", "c?")):
        messages, answers = [], []
        for question in questions:
            messages.append({"role": USER, "content": question})
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            answers.append(greedy(plain, prompt))
            content = [token for token in answers[-1] if token != tokenizer.eos_token_id]
            messages.append({"role": ASSISTANT, "content": tokenizer.decode(content, skip_special_tokens=True)})
        expected.append((prompt, answers[-1]))
    num_layers = plain.config.num_hidden_layers
    for item, entry, (prompt, answer) in zip(ds, map(ds.entry, range(3)), expected, strict=True):
        ids = item["token_ids"].tolist()
        assert ids == [*prompt, *answer]
        assert item["prompt_len"] == len(prompt)
        assert entry.finish_reason == ("stop" if answer[-1] == tokenizer.eos_token_id else "length")
        # the last answer is trained, all of it and exactly
        assert item["loss_mask"][len(prompt) :].all()
        assert item["loss_mask"].sum() >= len(answer)
        reference = oracle.hidden_states(plain, ids, [0, 2, num_layers])
        torch.testing.assert_close(item["hidden_states"], reference, rtol=1e-4, atol=1e-5)
    assert not ds[0]["loss_mask"][: ds[0]["prompt_len"]].any()
    # an earlier answer is trained only where the history shows the very tokens
    history = ds[2]["token_ids"][: ds[2]["prompt_len"]].tolist()
    trained = ds[2]["loss_mask"][: ds[2]["prompt_len"]]
    shown = [a for a in answers[:-1] if any(history[i : i + len(a)] == a for i in range(len(history)))]
    assert report.num_unshown == 2 - len(shown)
    assert int(trained.sum()) == sum(map(len, shown))


def test_a_run_that_stops_goes_on_with_the_same_answers(llm, make_input, folder, tmp_path):
    source = make_input([chat(f"number {number}?", "x", "and?") for number in range(9)])
    sampled = RegenerateOptions(temperature=1.5, max_tokens=8, seed=3)
    run(llm, source, tmp_path / "whole", sampled)
    asked = iter(range(100))
    for _ in range(3):
        report = run(llm, source, folder, sampled, should_stop=lambda: next(asked) % 4 == 3)
    assert report.num_skipped
    run(llm, source, folder, sampled)
    whole, parts = open_dataset(tmp_path / "whole", verify=True), open_dataset(folder, verify=True)
    assert len(parts) == 9
    same = [whole[i]["token_ids"].tolist() == parts[i]["token_ids"].tolist() for i in range(9)]
    assert all(same)
    assert [whole.loss_mask(i).tolist() for i in range(9)] == [parts.loss_mask(i).tolist() for i in range(9)]
    assert len({tuple(item["token_ids"][item["prompt_len"] :].tolist()) for item in whole}) > 1
    with pytest.raises(OptionError, match="regenerate"):
        run(llm, source, folder, RegenerateOptions(temperature=1.5, max_tokens=8, seed=4))
    with pytest.raises(OptionError, match="regenerate"):
        run(llm, source, folder, None)


def test_prompts_that_leave_no_room_fail_alone(llm, plain, make_input, folder):
    long = "long " * 100
    report = run(llm, make_input([chat("why?"), chat(long), {"prompt": "text"}]), folder)
    assert (report.num_samples, report.num_failed) == (2, 1)
    assert "line 2" in report.failures[0][1]
    assert open_dataset(folder).indices.tolist() == [0, 2]


def test_only_trained_rows_are_kept_of_texts_too(llm, make_input, folder):
    run(llm, make_input([{"prompt": "once upon"}]), folder, positions="trained")
    item = open_dataset(folder)[0]
    length = int(item["positions"][-1]) + 1
    assert item["positions"].tolist() == list(range(item["prompt_len"] - 1, length))
    assert item["loss_mask"].tolist() == [False] + [True] * (length - item["prompt_len"])


@pytest.mark.parametrize(
    ("roles", "answered"),
    [
        ("u", [1]),
        ("ua", [1]),
        ("sua", [2]),
        ("uaua", [1, 3]),
        ("uau", [1, 3]),
        ("uaaua", [1, 3]),  # two in a row are one answer
        ("aua", [2]),  # a greeting answers nothing
        ("uctau", [3, 5]),  # calls and their results stay
        ("uct", [3]),
    ],
)
def test_answers_stand_where_the_assistants_stood(roles, answered):
    names = {"u": USER, "a": ASSISTANT, "c": ASSISTANT, "s": "system", "t": "tool"}
    messages = tuple({"role": names[r], "content": r, **({"tool_calls": [CALL]} if r == "c" else {})} for r in roles)
    record = InputRecord(index=0, where="here", prompt=ChatPrompt(messages), source_hash="")
    waiting = _open(record).waiting
    assert [place for place, message in enumerate(waiting) if message is None] == answered
    assert waiting[-1] is None


def test_an_answer_is_trained_only_where_it_stands_as_it_was_generated():
    ids = [9, 1, 2, 3, 9, 4, 5, 9, 1, 2]
    assert _shown([[1, 2, 3], [4, 5]], [(1, 4), (5, 7)], ids) == [(1, 4), (5, 7)]
    assert _shown([[1, 2], [4, 6]], [(1, 4), (5, 7)], ids) == [(1, 3)]
    assert _shown([[1, 2, 7], [4, 5]], [(1, 4), (5, 7)], ids) == [(5, 7)]
    assert _shown([[1, 2, 3, 9]], [(1, 4)], ids) == []


def test_options_of_answers_need_regenerate(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("text\n")
    arguments = ["extract", "m", str(path), "--layers", "0", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(make_app(), [*arguments, "--max-tokens", "3"])
    assert result.exit_code == 2
    assert "give --regenerate, too" in " ".join(result.output.split())
    result = CliRunner().invoke(make_app(), [*arguments, "--regenerate", "--temperature", "-1"])
    assert (result.exit_code, "temperature" in result.output) == (2, True)
