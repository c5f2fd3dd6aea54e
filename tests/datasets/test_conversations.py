import pytest

from layertap.datasets.conversations import ChatPrompt, TextPrompt, TokenPrompt, parse_row, source_hash
from layertap.errors import PromptError

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "hi", "other": 1}, TextPrompt("hi")),
        ({"prompt": [1, 2]}, TokenPrompt((1, 2))),
        ({"prompt_token_ids": [0, 5]}, TokenPrompt((0, 5))),
        ({"messages": [USER]}, ChatPrompt((USER,))),
        ({"messages": [{**USER, "name": None}]}, ChatPrompt((USER,))),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"text": "i"}]}]},
            ChatPrompt(({"role": "user", "content": "h\ni"},)),
        ),
        ({"messages": [USER], "tools": [{"type": "function"}]}, ChatPrompt((USER,), ({"type": "function"},))),
        ({"messages": [USER], "tools": []}, ChatPrompt((USER,))),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
            ChatPrompt(({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},)),
        ),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": ""}], "system": "be"},
            ChatPrompt(({"role": "system", "content": "be"}, USER, {"role": "assistant", "content": ""})),
        ),
        ({"conversations": [{"role": "User", "content": "hi"}]}, ChatPrompt((USER,))),
        ({"conversations": [{"role": "User", "from": None, "value": None, "content": "hi"}]}, ChatPrompt((USER,))),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "", "weight": 0}]},
            ChatPrompt((USER, {"role": "assistant", "content": "", "weight": 0})),
        ),
        ({"prompt": None, "messages": [USER]}, ChatPrompt((USER,))),
    ],
)
def test_rows_of_every_style_become_prompts(row, prompt):
    assert parse_row(row) == prompt


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "expected an object with one of prompt, prompt_token_ids, messages, conversations, got a list"),
        ({"text": "hi"}, r"no prompt: expected one of .* \(keys: 'text'\)"),
        ({"prompt": "a", "messages": [USER]}, "more than one prompt in a row .*choose one by the option `field`"),
        ({"prompt": ""}, "prompt: the text is empty"),
        ({"prompt": 3}, "prompt: expected text, got a number"),
        ({"prompt": "a\ud800"}, "prompt: character 1 is half a surrogate pair"),
        ({"prompt_token_ids": []}, "the list is empty"),
        ({"prompt_token_ids": "12"}, "expected a list of token ids, got text"),
        ({"prompt_token_ids": [1, True]}, r"prompt_token_ids\[1\]: expected a token id, got a boolean True"),
        ({"prompt_token_ids": [1, 1.0]}, r"prompt_token_ids\[1\]: expected a token id, got float"),
        ({"prompt_token_ids": [-1]}, r"-1 can't be a token id"),
        ({"prompt_token_ids": [10**5000]}, r"a number of \d+ bits can't be a token id"),
        ({"messages": []}, "messages: the list is empty"),
        ({"messages": ["hi"]}, r"messages\[0\]: expected an object, got text 'hi'"),
        ({"messages": [{"content": "hi"}]}, r"messages\[0\]: expected a 'role', got None"),
        ({"messages": [USER, {"role": "user"}]}, r"messages\[1\]: no 'content'"),
        ({"messages": [{"role": "user", "content": 1}]}, r"messages\[0\].content: expected text, got a number"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts of text can be taken"),
        ({"messages": [USER], "tools": "x"}, "tools: expected a list of objects, got text"),
        ({"messages": [USER], "tools": [{"name": "\ud800"}]}, r"tools\[0\].name: character 0 is half a surrogate"),
        (
            {"messages": [{**USER, "tool_calls": "f()"}]},
            r"messages\[0\].tool_calls: expected a list of objects, got 'f",
        ),
        ({"messages": [{**USER, "tool_calls": ["f"]}]}, r"messages\[0\].tool_calls: expected a list of objects"),
        ({"messages": [{**USER, "reasoning": "\udc00"}]}, r"messages\[0\].reasoning: character 0 is half a surrogate"),
        ({"messages": [{**USER, "a": [{"\ud800": 1}]}]}, r"messages\[0\].a\[0\]: character 0 is half a surrogate"),
        ({"conversations": [{"from": "alien", "value": "hi"}]}, r"conversations\[0\]: 'from' is 'alien'"),
        ({"conversations": [{"from": "human"}]}, r"conversations\[0\]: expected text in 'value', got null"),
        ({"conversations": [{"from": "human", "value": "a"}], "system": 1}, "system: expected text"),
    ],
)
def test_a_bad_row_is_refused_with_what_is_wrong(row, message):
    with pytest.raises(PromptError, match=message):
        parse_row(row)


def test_the_field_decides_where_a_row_has_several():
    row = {"prompt": "a", "messages": [USER]}
    assert parse_row(row, "prompt") == TextPrompt("a")
    assert parse_row(row, "messages") == ChatPrompt((USER,))
    with pytest.raises(PromptError, match="there is no 'conversations'"):
        parse_row(row, "conversations")


def test_the_hash_is_of_the_content_not_of_its_spelling():
    openai = parse_row({"messages": [{"content": "hi", "role": "user", "name": None}]})
    sharegpt = parse_row({"conversations": [{"from": "human", "value": "hi"}]})
    assert source_hash(openai) == source_hash(sharegpt)
    different = [
        TextPrompt("hi"),
        TextPrompt("hi "),
        TokenPrompt((1, 2)),
        TokenPrompt((12,)),
        ChatPrompt((USER,)),
        ChatPrompt((USER,), ({"type": "function"},)),
        ChatPrompt((USER, USER)),
    ]
    assert len({source_hash(prompt) for prompt in different}) == len(different)


def test_nulls_that_somebody_wrote_stay_and_those_that_say_that_there_is_nothing_go():
    call = {"type": "function", "function": {"name": "f", "arguments": {"unit": None}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"unit": {"default": None}}}}
    said = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [{**call, "index": None}]}
    prompt = parse_row({"messages": [USER, said], "tools": [tool]})
    assert prompt == ChatPrompt((USER, {"role": "assistant", "content": None, "tool_calls": [call]}), (tool,))
    assert parse_row({"messages": [{**USER, "tool_calls": None}]}) == ChatPrompt((USER,))


def test_parts_of_a_message_are_joined_as_the_server_joins_them():
    from layertap.prompts import as_templates_read

    message = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    assert parse_row({"messages": [message]}) == ChatPrompt((as_templates_read(message),))
