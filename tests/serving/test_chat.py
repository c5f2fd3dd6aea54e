"""`/v1/chat/completions` as the official client sees it."""

import copy

import openai
import pytest

from layertap import PromptError, load_hidden_states
from layertap.prompts import PromptReader

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]


def ask(client, messages=MESSAGES, capture=None, **body):
    extra = {"return_token_ids": True, "ignore_eos": True, **body.pop("extra", {})}
    if capture is not None:
        extra["kv_transfer_params"] = capture
    return client.chat.completions.create(model="tiny", messages=messages, extra_body=extra, **body)


def load(handle):
    return load_hidden_states(handle["hidden_states_path"])


def test_the_prompt_is_the_models_chat_template(client, llm, check_rows):
    answer = ask(client, max_tokens=2)
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert answer.prompt_token_ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    check_rows(load(answer.kv_transfer_params), answer.prompt_token_ids)


def test_each_choice_has_its_rows(client, check_rows):
    answer = ask(client, capture={"include_output_tokens": True}, n=3, max_completion_tokens=5, seed=2)
    assert answer.choices[0].message.role == "assistant"
    for choice in answer.choices:
        check_rows(load(choice.kv_transfer_params), (answer.prompt_token_ids + choice.token_ids)[:-1])


def test_positions_output_gives_the_answers_rows(client, check_rows):
    answer = ask(client, capture={"positions": "output"}, max_tokens=5)
    tokens = answer.prompt_token_ids + answer.choices[0].token_ids
    check_rows(load(answer.kv_transfer_params), tokens[:-1], first=len(answer.prompt_token_ids))


def test_a_stream_begins_with_roles_and_ends_with_handles(client):
    whole = ask(client, n=2, max_tokens=8, seed=4)
    chunks = list(ask(client, n=2, max_tokens=8, seed=4, stream=True, stream_options={"include_usage": True}))
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    for choice in whole.choices:
        mine = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].index == choice.index]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in mine) == choice.message.content
        last = mine[-1].choices[0]
        assert last.finish_reason == "length"
        assert load(last.kv_transfer_params)["token_ids"].tolist() == whole.prompt_token_ids
        assert ("kv_transfer_params" in mine[-1].model_extra) == (choice.index == 0)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_logprobs_have_one_entry_per_token_with_its_bytes(client):
    (choice,) = ask(client, max_tokens=4, logprobs=True, top_logprobs=2).choices
    assert len(choice.logprobs.content) == 4
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert bytes(entry.bytes).decode() == entry.token


def test_without_max_tokens_the_models_length_is_the_limit(client, llm):
    short = ask(client, [{"role": "user", "content": "x" * 60}])
    assert short.usage.total_tokens == llm.info.max_model_len
    assert short.choices[0].finish_reason == "length"


def test_continuing_a_message_leaves_its_turn_open(client):
    messages = [*MESSAGES, {"role": "assistant", "content": "Hel"}]
    closed = ask(client, messages, max_tokens=1)
    still_open = ask(
        client, messages, max_tokens=1, extra={"continue_final_message": True, "add_generation_prompt": False}
    )
    assert closed.prompt_token_ids[: len(still_open.prompt_token_ids)] == still_open.prompt_token_ids
    assert len(still_open.prompt_token_ids) < len(closed.prompt_token_ids)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"content": "no role"}]}, None),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"extra": {"guided_json": {}}}, "guided_json"),
    ],
)
def test_what_cant_be_honoured_is_a_400_that_names_it(client, body, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **body)
    if param is not None:
        assert caught.value.param == param
    if param in ("response_format", "tool_choice"):
        assert "--engine vllm" in str(caught.value)


def test_tools_are_shown_to_the_model_by_its_template(llm):
    tokenizer = copy.deepcopy(llm.get_tokenizer())
    tokenizer.chat_template = (
        "{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "weather"}}]
    prompt = PromptReader(llm.info, tokenizer).chat([{"role": "user", "content": "hi"}], tools=tools)
    assert prompt.text == "[weather]hi"


def test_messages_of_the_official_client_are_shown_to_templates_as_vllm_shows_them(llm):
    tokenizer = copy.deepcopy(llm.get_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
    )
    reader = PromptReader(llm.info, tokenizer)

    def calls(arguments):
        function = {"name": "weather", "arguments": arguments}
        call = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        }
        return [{"role": "user", "content": "hi"}, call, {"role": "tool", "tool_call_id": "1", "content": "rain"}]

    for arguments in ('{"place": "Paris"}', {"place": "Paris"}):
        text = reader.chat(calls(arguments), add_generation_prompt=False).text
        assert text == '<user>hi<assistant>weather({"place": "Paris"})<tool>rain'
    assert "weather({})" in reader.chat(calls("")).text
    for wrong, words in (("{place", "aren't JSON"), ("[1]", "aren't a JSON object")):
        with pytest.raises(PromptError, match=f"^messages: the arguments of a tool call {words}"):
            reader.chat(calls(wrong))
    with pytest.raises(PromptError, match="^messages: content parts of type 'image_url'"):
        reader.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}])
