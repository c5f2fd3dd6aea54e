"""`/v1/completions` as the official client sees it."""

import pytest
import torch

from layertap import load_hidden_states

TEXT = "the heat of the earth"


def complete(client, prompt=TEXT, capture=None, **body):
    extra = {"return_token_ids": True, **body.pop("extra", {})}
    if capture is not None:
        extra["kv_transfer_params"] = capture
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **body)


def load(choice):
    return load_hidden_states(choice.kv_transfer_params["hidden_states_path"])


def test_the_models_are_listed_under_their_served_names(client):
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").max_model_len > 0


def test_the_file_of_an_answer_holds_the_rows_of_its_prompt(client, check_rows):
    answer = complete(client, max_tokens=3)
    (choice,) = answer.choices
    assert answer.kv_transfer_params == choice.kv_transfer_params
    check_rows(load(choice), choice.prompt_token_ids)


def test_include_output_tokens_adds_all_rows_but_the_last_tokens(client, check_rows):
    (choice,) = complete(
        client, capture={"include_output_tokens": True}, max_tokens=6, extra={"ignore_eos": True}
    ).choices
    assert len(choice.token_ids) == 6
    check_rows(load(choice), (choice.prompt_token_ids + choice.token_ids)[:-1])


def test_several_prompts_and_choices_have_a_file_each(client, check_rows):
    prompts = ["one", "and two", [9, 10, 11]]
    with_ids = [prompt for prompt in prompts if isinstance(prompt, list)]
    answer = complete(client, prompts[:2], {"include_output_tokens": True}, n=3, max_tokens=4, seed=7)
    assert [choice.index for choice in answer.choices] == list(range(6))
    paths = {choice.kv_transfer_params["hidden_states_path"] for choice in answer.choices}
    assert len(paths) == 6
    for choice in answer.choices:
        check_rows(load(choice), (choice.prompt_token_ids + choice.token_ids)[:-1])
    names = [choice.kv_transfer_params["hidden_states_id"] for choice in answer.choices]
    assert names == [answer.id + suffix for suffix in ("", "-0-1", "-0-2", "-1-0", "-1-1", "-1-2")]
    (choice,) = complete(client, with_ids, max_tokens=1).choices
    assert choice.prompt_token_ids == with_ids[0]


def test_greedy_tokens_and_logprobs_are_those_of_transformers(client, reference):
    extra = {"ignore_eos": True, "return_tokens_as_token_ids": True}
    (choice,) = complete(client, temperature=0, max_tokens=5, logprobs=3, extra=extra).choices
    ids = list(choice.prompt_token_ids)
    for i in range(5):
        with torch.no_grad():
            logprobs = reference(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
        assert int(logprobs.argmax()) == choice.token_ids[i]
        assert choice.logprobs.token_logprobs[i] == pytest.approx(float(logprobs.max()), abs=1e-3)
        best = logprobs.topk(3)
        expected = {f"token_id:{t}": v for t, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)}
        assert choice.logprobs.top_logprobs[i] == pytest.approx(expected, abs=1e-3)
        ids.append(choice.token_ids[i])


def test_usage_counts_all_prompts_and_choices(client):
    answer = complete(client, ["a", "b c"], n=2, max_tokens=3, extra={"ignore_eos": True})
    prompts = sum(len(choice.prompt_token_ids) for choice in answer.choices[::2])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompts, 12)
    assert answer.usage.total_tokens == prompts + 12


def test_a_stop_string_ends_the_text_and_keeps_the_handle(client, check_rows):
    whole = complete(client, seed=3, max_tokens=40, extra={"ignore_eos": True}).choices[0]
    stop = whole.text[5:7]
    cut = complete(
        client, capture={"include_output_tokens": True}, seed=3, max_tokens=40, stop=[stop], extra={"ignore_eos": True}
    )
    (choice,) = cut.choices
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == stop
    assert choice.text == whole.text[: whole.text.index(stop)]
    check_rows(load(choice), (choice.prompt_token_ids + choice.token_ids)[:-1])


def test_a_stream_says_the_same_as_the_whole_answer(client):
    body = {"seed": 11, "max_tokens": 12, "n": 2, "logprobs": 1}
    whole = complete(client, ["ab", "cd"], **body)
    texts, tokens, handles, logprobs = {}, {}, {}, {}
    usage = None
    for chunk in complete(client, ["ab", "cd"], stream=True, stream_options={"include_usage": True}, **body):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            tokens.setdefault(choice.index, []).extend(choice.token_ids)
            logprobs.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
            if choice.finish_reason is not None:
                assert choice.index not in handles
                handles[choice.index] = choice.kv_transfer_params
                if choice.index == 0:
                    assert chunk.kv_transfer_params == choice.kv_transfer_params
            else:
                assert "kv_transfer_params" not in choice.model_extra
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert tokens[choice.index] == choice.token_ids
        assert logprobs[choice.index] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
        assert load_hidden_states(handles[choice.index]["hidden_states_path"])
    assert len({handle["hidden_states_id"] for handle in handles.values()}) == 4
    assert usage == whole.usage


def test_echo_puts_the_prompt_in_front(client):
    plain, echoed = (complete(client, seed=5, max_tokens=3, extra={"echo": echo}) for echo in (False, True))
    assert echoed.choices[0].text == TEXT + plain.choices[0].text
    chunks = complete(client, seed=5, max_tokens=3, stream=True, extra={"echo": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed.choices[0].text


def test_without_capture_there_is_no_handle(client, storage):
    answer = complete(client, capture={"capture": False}, max_tokens=1)
    assert answer.choices[0].kv_transfer_params is None
    assert answer.kv_transfer_params is None
    assert not [path for path in storage.iterdir() if answer.id in path.name]


def test_layers_positions_and_dtype_are_per_request(client, states_of):
    (choice,) = complete(
        client, capture={"layers": [4, 0], "positions": [1, 3], "save_dtype": "bfloat16"}, max_tokens=1
    ).choices
    states = load(choice)
    expected = states_of(choice.prompt_token_ids, (4, 0))[1:3]
    assert states["hidden_states"].dtype == torch.bfloat16
    assert torch.equal(states["hidden_states"], expected.bfloat16()) or torch.allclose(
        states["hidden_states"].float(), expected, rtol=1e-2, atol=1e-3
    )
    assert states["token_ids"].tolist() == choice.prompt_token_ids[1:3]


def test_a_clients_request_id_is_cleaned_and_stays_in_the_answers(http):
    for given, cleaned in (("job-17", "job-17"), ("../../etc/x y", "______etc_x_y"), ("a" * 300, "a" * 64)):
        answer = http.post(
            "/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1}, headers={"x-request-id": given}
        )
        name = answer.json()["id"]
        assert name.startswith(f"cmpl-{cleaned}-")
        assert len(name) == len(f"cmpl-{cleaned}-") + 16
        assert answer.headers["x-request-id"] == name


def test_a_custom_path_is_ignored_unless_allowed(client, tmp_path):
    target = tmp_path / "mine.safetensors"
    answer = complete(client, capture={"hidden_states_path": str(target)}, max_tokens=1)
    assert answer.kv_transfer_params["hidden_states_path"] != str(target)
    assert not target.exists()
