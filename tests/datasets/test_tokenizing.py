import json

import pytest
from chat_templates import TEMPLATES, chat_tokenizer, unmarked
from model_info import INFO

from layertap.datasets.conversations import parse_row
from layertap.datasets.inputs import InputRecord
from layertap.datasets.tokenizing import RecordTokenizer

ARGUMENTS = {"city": "Oslo", "days": [1, 2]}


def talk(arguments, content):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
        {"role": "assistant", "content": [{"type": "text", "text": "Rain."}]},
    ]
    return InputRecord(index=0, where="line 1", prompt=parse_row({"messages": messages}), source_hash="")


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("name", ["qwen", "mistral", "gpt_oss", "deepseek", "llama3"])
def test_calls_as_the_openai_api_has_them_are_read_and_masked_like_calls_with_a_dict(name, marked):
    template = TEMPLATES[name] if marked else unmarked(TEMPLATES[name])
    reader = RecordTokenizer(INFO, chat_tokenizer(template))
    prompt, mask = reader.read(talk(ARGUMENTS, ""))
    assert len(mask) == 2
    assert reader.read(talk(json.dumps(ARGUMENTS), None)) == (prompt, mask)
