import pytest
from chat_templates import CHATML, TAKES_TOOLS, TEMPLATES, TODAY, applied, chat_tokenizer, unmarked
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.datasets.masks import LossMasks
from layertap.errors import PromptError

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}}


@pytest.fixture(scope="module")
def tokenizers():
    return {
        (name, marked): chat_tokenizer(template if marked else unmarked(template))
        for name, template in TEMPLATES.items()
        for marked in (True, False)
    }


def trained(tokenizer, messages, tools=None, **options):
    """What the mask holds, turn by turn, as text."""
    rendering = {"tools": tools, "add_generation_prompt": options.get("add_generation_prompt", False)}
    text = applied(tokenizer, messages, tokenize=False, **rendering)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    spans = LossMasks(tokenizer, template_kwargs=TODAY).spans(text, ids, messages, tools, **options)
    return [tokenizer.decode(ids[first:end]) for first, end in spans]


def mask_of_transformers(tokenizer, messages, tools=None):
    encoded = applied(tokenizer, messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    return encoded["input_ids"], encoded["assistant_masks"]


def assert_like_transformers(tokenizers, name, messages, tools=None):
    """The mask with marks and the mask without are both that of transformers, token by token."""
    ids, expected = mask_of_transformers(tokenizers[name, True], messages, tools)
    for marked in (True, False):
        tokenizer = tokenizers[name, marked]
        text = applied(tokenizer, messages, tools, tokenize=False)
        spans = LossMasks(tokenizer, template_kwargs=TODAY).spans(text, ids, messages, tools)
        mask = [0] * len(ids)
        for first, end in spans:
            mask[first:end] = [1] * (end - first)
        assert mask == expected, (name, marked, text)


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "Be kind."}
TALK = [SYSTEM, user("Why?"), assistant("Because."), user("Really?"), assistant("  Yes, really.\n")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", ["Because.<|im_end|>", "  Yes, really.\n<|im_end|>"]),
        ("qwen", ["Because.<|im_end|>", "<think>\n\n</think>\n\n  Yes, really.\n<|im_end|>"]),
        ("llama3", ["Because.<|eot_id|>", "Yes, really.<|eot_id|>"]),
        ("mistral", [" Because.<eos>", " Yes, really.<eos>"]),
        ("gemma", ["Because.<end_of_turn>", "Yes, really.<end_of_turn>"]),
        ("deepseek", ["Because.<eos>", "  Yes, really.\n<eos>"]),
        (
            "gpt_oss",
            ["<|channel|>final<|message|>Because.<|end|>", "<|channel|>final<|message|>  Yes, really.\n<|return|>"],
        ),
        ("headers_only", ["Because.", "  Yes, really.\n"]),
        ("llama2", [" Because. <eos>", " Yes, really. <eos>"]),
        ("phi3", ["Because.<|end|>", "  Yes, really.\n<|end|>"]),
    ],
)
def test_a_turn_is_its_content_and_end_but_not_its_header_or_the_newline_behind(tokenizers, name, expected):
    for marked in (True, False):
        assert trained(tokenizers[name, marked], TALK) == expected


def test_the_header_of_a_next_turn_is_not_trained(tokenizers):
    for name in TEMPLATES:
        for marked in (True, False):
            tokenizer = tokenizers[name, marked]
            assert trained(tokenizer, TALK, add_generation_prompt=True) == trained(tokenizer, TALK)


def test_an_end_that_is_the_next_header_counts_where_the_model_ends_by_it(tokenizers):
    tokenizer = tokenizers["headers_only", False]
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    masks = LossMasks(tokenizer, eos_token_ids=[tokenizer.convert_tokens_to_ids("<|user|>")])
    assert [tokenizer.decode(ids[a:b]) for a, b in masks.spans(text, ids, TALK)] == [
        "Because.<|user|>",
        "  Yes, really.\n",
    ]


@pytest.mark.parametrize("name", TAKES_TOOLS)
def test_calls_of_tools_are_trained_and_their_answers_are_not(tokenizers, name):
    talk = [
        user("Weather?"),
        assistant("", tool_calls=[CALL], thinking="let me see", reasoning_content="let me see"),
        {"role": "tool", "content": '{"rain": true}', "name": "weather"},
        assistant("Rain."),
        user("And now?"),
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "content": "sun"},
        assistant("Sun.", thinking="bright", reasoning_content="bright"),
        user("Thanks"),
        assistant("", tool_calls=[CALL]),
    ]
    for end in range(2, len(talk) + 1):
        assert_like_transformers(tokenizers, name, talk[:end], TOOLS)
    first, second, *_ = trained(tokenizers[name, False], talk, TOOLS)
    assert "Oslo" in first
    assert "rain" not in "".join(trained(tokenizers[name, False], talk, TOOLS))
    assert "Rain." in second


def test_reasoning_is_trained_where_the_template_shows_it(tokenizers):
    inline = "<think>\nhm, 2\n</think>\n\nTwo."
    talk = [user("1+1?"), assistant(inline), user("sure?"), assistant(inline)]
    turn = "<think>\nhm, 2\n</think>\n\nTwo.<|im_end|>"
    for marked in (True, False):
        assert trained(tokenizers["qwen", marked], talk) == ["Two.<|im_end|>", turn]
        assert trained(tokenizers["qwen", marked], [user("?"), assistant("Two.", reasoning_content="hm, 2")]) == [turn]
        assert trained(tokenizers["gpt_oss", marked], [user("?"), assistant("Two.", thinking="hm")]) == [
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Two.<|return|>"
        ]
        # its generation prompt ends in "<think>\n", which the history doesn't have
        assert trained(tokenizers["deepseek", marked], talk) == ["\n\nTwo.<eos>"] * 2
        assert trained(tokenizers["deepseek", marked], [user("?"), assistant("<thin air>")]) == ["<thin air><eos>"]


# Pieces that could be taken for something else: headers, ends of turns, blanks, the template's own words.
PIECES = (
    "a",
    "Because.",
    " ",
    "\n",
    "\n\n",
    "<",
    "<|",
    "assistant",
    "<|im_end|",
    "model\n",
    "[/INST",
    "\xe9",
    "\U0001f600",
    "}",
)
contents = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)


@st.composite
def talks(draw):
    talk = [{"role": "system", "content": draw(contents)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        talk += [user(draw(contents)), assistant(draw(contents))]
    return talk


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_that_the_assistant_begins_is_masked_or_refused_where_no_header_shows_its_start(tokenizers, name):
    talk = [assistant("<|im_start|>assistant\nHello."), user("Why?"), assistant("Because.")]
    if name in ("mistral", "llama2"):
        with pytest.raises(PromptError, match="begin the chat with another message"):
            trained(tokenizers[name, False], talk)
    else:
        assert_like_transformers(tokenizers, name, talk)
        assert_like_transformers(tokenizers, name, talk[:1])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_right_behind_the_system_prompt_is_masked_or_refused_where_it_holds_that_prompt(tokenizers, name):
    talk = [SYSTEM, assistant("Hello."), user("Why?"), assistant("Because.")]
    if name == "gemma":
        with pytest.raises(PromptError, match=r"shows messages\[0\] within this turn"):
            trained(tokenizers[name, False], talk)
    else:
        assert_like_transformers(tokenizers, name, talk)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("marked", [True, False])
def test_a_message_of_weight_0_is_not_trained_and_changes_nothing_else(tokenizers, name, marked):
    talk = [user("Why?"), assistant("So."), user("Why?"), assistant("So."), user("Sure?"), assistant("")]
    whole = trained(tokenizers[name, marked], talk)
    for silent in ({1}, {3}, {5}, {1, 5}, {1, 3, 5}):
        weighted = [{**one, "weight": int(place not in silent)} for place, one in enumerate(talk)]
        turns = [turn for turn, place in zip(whole, (1, 3, 5), strict=False) if place not in silent]
        assert trained(tokenizers[name, marked], weighted) == turns
    with pytest.raises(PromptError, match=r"messages\[1\].weight: 0.5 can't be honoured"):
        trained(tokenizers[name, marked], [talk[0], {**talk[1], "weight": 0.5}])


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(talk=talks())
def test_masks_found_from_outside_are_those_of_the_marks_for_any_content(tokenizers, name, talk):
    if name == "headers_only":
        # transformers leaves the last bytes out where a turn ends within a character of several tokens
        talk = [{**message, "content": message["content"] + "."} for message in talk]
    assert_like_transformers(tokenizers, name, talk)


def test_the_last_character_is_trained_with_all_of_its_tokens(tokenizers):
    for marked in (True, False):
        assert trained(tokenizers["headers_only", marked], [user("?"), assistant("\xe9\U0001f600")]) == [
            "\xe9\U0001f600"
        ]


def test_a_text_that_is_tokenized_otherwise_is_refused(tokenizers):
    tokenizer = tokenizers["chatml", False]
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    with pytest.raises(PromptError, match="other tokens"):
        LossMasks(tokenizer).spans(text, [1, 2, 3], TALK)


def test_a_chat_without_the_assistant_trains_nothing(tokenizers):
    for marked in (True, False):
        assert trained(tokenizers["chatml", marked], [SYSTEM, user("Why?")]) == []


def test_a_turn_that_ends_otherwise_where_another_one_follows_is_refused():
    ends = "{{- ('<|im_end|>' if loop.last and not add_generation_prompt else '<eos>') + '\\n' }}"
    template = unmarked(CHATML).replace("message['content'] + '<|im_end|>'", "message['content']")
    tokenizer = chat_tokenizer(template.replace("{{- '\\n' }}", ends))
    assert trained(tokenizer, TALK) == ["Because.<eos>", "  Yes, really.\n<|im_end|>"]
    with pytest.raises(PromptError, match="with a generation prompt"):
        trained(tokenizer, TALK, add_generation_prompt=True)


def test_a_template_whose_turns_do_not_begin_like_its_generation_prompt_is_refused():
    tokenizer = chat_tokenizer(unmarked(CHATML).replace("{{- '<|im_start|>assistant\\n' }}", "{{- 'ANSWER:' }}"))
    with pytest.raises(PromptError, match="doesn't begin this turn with its generation prompt"):
        trained(tokenizer, TALK)


def test_thoughts_that_are_switched_off_are_the_headers_and_not_trained(tokenizers):
    tokenizer, off = tokenizers["qwen", False], {**TODAY, "enable_thinking": False}
    text = applied(tokenizer, TALK, tokenize=False, enable_thinking=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    spans = LossMasks(tokenizer, template_kwargs=off).spans(text, ids, TALK)
    assert [tokenizer.decode(ids[first:end]) for first, end in spans] == [
        "Because.<|im_end|>",
        "  Yes, really.\n<|im_end|>",
    ]
    assert text[: text.index("  Yes, really.")].endswith("<think>\n\n</think>\n\n")
