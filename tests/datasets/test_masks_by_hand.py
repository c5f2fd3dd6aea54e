"""Whole chats in six styles, written down by hand: what stands between two `~` is trained, nothing else is.

The other tests compare with transformers' marks in the same templates; here nothing but a reader's eye says what is right.
"""

import pytest
from chat_templates import TEMPLATES, TODAY, applied, chat_tokenizer, unmarked

from layertap.datasets.masks import LossMasks

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}}
ANSWER = {"role": "tool", "name": "weather", "content": '{"rain": true}'}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, reasoning=None, **more):
    """Styles name their reasoning differently; each takes its own."""
    thoughts = {} if reasoning is None else {"reasoning_content": reasoning, "thinking": reasoning}
    return {"role": "assistant", "content": content, **thoughts, **more}


SEVERAL_TURNS = [
    {"role": "system", "content": "Be kind."},
    *(user("Why?"), assistant("Because.")),
    *(user("Really?"), assistant("  Yes, really.\n")),
]
WITH_TOOLS = [
    *(user("Weather?"), assistant("", tool_calls=[CALL]), ANSWER, assistant("Rain.")),
    *(user("Thanks"), assistant("Bye.")),
]
WITH_REASONING = [
    *(user("1+1?"), assistant("Two.", "easy")),
    *(user("Sure?"), assistant("Yes.", "hm, 2")),
]
INLINE_REASONING = [
    *(user("1+1?"), assistant("<think>\neasy\n</think>\n\nTwo.")),
    *(user("Sure?"), assistant("<think>\nhm, 2\n</think>\n\nYes.")),
]
REASONING_AND_TOOLS = [
    *(user("Weather?"), assistant("", "look", tool_calls=[CALL]), ANSWER, assistant("Rain.", "wet")),
]

QWEN_TOOLS = (
    '<|im_start|>system\n# Tools\n<tools>\n{"type": "function", "function": {"name": "weather", "parameters": '
    '{"type": "object", "properties": {}}}}\n</tools><|im_end|>\n'
)
LLAMA3_HEAD = "<bos><|start_header_id|>system<|end_header_id|>\n\nToday: 02 Jan 2026\n"
LLAMA3_USER = "<|start_header_id|>user<|end_header_id|>\n\n"
LLAMA3_MODEL = "<|start_header_id|>assistant<|end_header_id|>\n\n"
GPT_OSS_HEAD = "<|start|>system<|message|>Today: 2026-01-02<|end|>"

BY_HAND = {
    ("qwen", "several turns"): (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\n~Because.<|im_end|>~\n<|im_start|>user\nReally?<|im_end|>\n"
        "<|im_start|>assistant\n~<think>\n\n</think>\n\n  Yes, really.\n<|im_end|>~\n"
    ),
    ("qwen", "tools"): (
        QWEN_TOOLS + "<|im_start|>user\nWeather?<|im_end|>\n"
        '<|im_start|>assistant\n~<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n'
        "</tool_call><|im_end|>~\n"
        '<|im_start|>user\n<tool_response>\n{"rain": true}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n~Rain.<|im_end|>~\n<|im_start|>user\nThanks<|im_end|>\n"
        "<|im_start|>assistant\n~<think>\n\n</think>\n\nBye.<|im_end|>~\n"
    ),
    ("qwen", "reasoning"): (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n~Two.<|im_end|>~\n<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n~<think>\nhm, 2\n</think>\n\nYes.<|im_end|>~\n"
    ),
    ("qwen", "inline reasoning"): (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n~Two.<|im_end|>~\n<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n~<think>\nhm, 2\n</think>\n\nYes.<|im_end|>~\n"
    ),
    ("qwen", "reasoning and tools"): (
        QWEN_TOOLS + "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n~<think>\nlook\n</think>\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call><|im_end|>~\n'
        '<|im_start|>user\n<tool_response>\n{"rain": true}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n~<think>\nwet\n</think>\n\nRain.<|im_end|>~\n"
    ),
    ("llama3", "several turns"): (
        LLAMA3_HEAD + "Be kind.<|eot_id|>" + LLAMA3_USER + "Why?<|eot_id|>" + LLAMA3_MODEL + "~Because.<|eot_id|>~"
        "" + LLAMA3_USER + "Really?<|eot_id|>" + LLAMA3_MODEL + "~Yes, really.<|eot_id|>~"
    ),
    ("llama3", "tools"): (
        LLAMA3_HEAD + "<|eot_id|>" + LLAMA3_USER + "Weather?<|eot_id|>" + LLAMA3_MODEL + '~{"name": "weather", '
        '"parameters": {"city": "Oslo", "days": 2}}<|eom_id|>~'
        '<|start_header_id|>ipython<|end_header_id|>\n\n{"rain": true}<|eot_id|>' + LLAMA3_MODEL + "~Rain.<|eot_id|>~"
        "" + LLAMA3_USER + "Thanks<|eot_id|>" + LLAMA3_MODEL + "~Bye.<|eot_id|>~"
    ),
    ("mistral", "several turns"): (
        "<bos>[INST] Why? [/INST]~ Because.<eos>~[INST] Really? [/INST]~ Yes, really.<eos>~"
    ),
    ("mistral", "tools"): (
        '<bos>[INST] Weather? [/INST]~[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}]<eos>~'
        '[TOOL_RESULTS] {"content": "{\\"rain\\": true}"}[/TOOL_RESULTS]~ Rain.<eos>~[INST] Thanks [/INST]~ Bye.<eos>~'
    ),
    ("gemma", "several turns"): (
        "<bos><start_of_turn>user\nBe kind.\n\nWhy?<end_of_turn>\n<start_of_turn>model\n~Because.<end_of_turn>~\n"
        "<start_of_turn>user\nReally?<end_of_turn>\n<start_of_turn>model\n~Yes, really.<end_of_turn>~\n"
    ),
    ("deepseek", "several turns"): (
        "<bos>Be kind.<|User|>Why?<|Assistant|>~Because.<eos>~<|User|>Really?<|Assistant|>~  Yes, really.\n<eos>~"
    ),
    ("deepseek", "tools"): (
        "<bos><|User|>Weather?<|Assistant|>~<|tool_calls_begin|>weather<|tool_sep|>"
        '{"city": "Oslo", "days": 2}<|tool_call_end|><|tool_calls_end|><eos>~'
        '<|tool_output_begin|>{"rain": true}<|tool_output_end|><|Assistant|>~Rain.<eos>~'
        "<|User|>Thanks<|Assistant|>~Bye.<eos>~"
    ),
    # the style drops the reasoning of the history, whose opening its generation prompt writes
    ("deepseek", "inline reasoning"): (
        "<bos><|User|>1+1?<|Assistant|>~\n\nTwo.<eos>~<|User|>Sure?<|Assistant|>~\n\nYes.<eos>~"
    ),
    ("gpt_oss", "several turns"): (
        GPT_OSS_HEAD + "<|start|>system<|message|>Be kind.<|end|><|start|>user<|message|>Why?<|end|>"
        "<|start|>assistant~<|channel|>final<|message|>Because.<|end|>~<|start|>user<|message|>Really?<|end|>"
        "<|start|>assistant~<|channel|>final<|message|>  Yes, really.\n<|return|>~"
    ),
    ("gpt_oss", "tools"): (
        GPT_OSS_HEAD + "<|start|>user<|message|>Weather?<|end|><|start|>assistant~ to=functions.weather"
        '<|channel|>commentary json<|message|>{"city": "Oslo", "days": 2}<|call|>~'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"{\\"rain\\": true}"<|end|>'
        "<|start|>assistant~<|channel|>final<|message|>Rain.<|end|>~<|start|>user<|message|>Thanks<|end|>"
        "<|start|>assistant~<|channel|>final<|message|>Bye.<|return|>~"
    ),
    ("gpt_oss", "reasoning"): (
        GPT_OSS_HEAD + "<|start|>user<|message|>1+1?<|end|><|start|>assistant~<|channel|>final<|message|>Two.<|end|>~"
        "<|start|>user<|message|>Sure?<|end|><|start|>assistant~<|channel|>analysis<|message|>hm, 2<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>~"
    ),
    ("gpt_oss", "reasoning and tools"): (
        GPT_OSS_HEAD
        + "<|start|>user<|message|>Weather?<|end|><|start|>assistant~<|channel|>analysis<|message|>look<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Oslo", "days": 2}<|call|>~'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"{\\"rain\\": true}"<|end|>'
        "<|start|>assistant~<|channel|>analysis<|message|>wet<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Rain.<|return|>~"
    ),
}
CHATS = {
    "several turns": (SEVERAL_TURNS, None),
    "tools": (WITH_TOOLS, TOOLS),
    "reasoning": (WITH_REASONING, None),
    "inline reasoning": (INLINE_REASONING, None),
    "reasoning and tools": (REASONING_AND_TOOLS, TOOLS),
}


@pytest.mark.parametrize("marked", [False, True], ids=["found", "marks"])
@pytest.mark.parametrize(("style", "chat"), BY_HAND)
def test_exactly_what_is_between_the_signs_is_trained(style, chat, marked):
    messages, tools = CHATS[chat]
    tokenizer = chat_tokenizer(TEMPLATES[style] if marked else unmarked(TEMPLATES[style]))
    text = applied(tokenizer, messages, tools, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    shown, done = [], 0
    for first, end in LossMasks(tokenizer, template_kwargs=TODAY).spans(text, ids, messages, tools):
        shown += [tokenizer.decode(ids[done:first]), tokenizer.decode(ids[first:end])]
        done = end
    assert "~".join([*shown, tokenizer.decode(ids[done:])]) == BY_HAND[style, chat]
