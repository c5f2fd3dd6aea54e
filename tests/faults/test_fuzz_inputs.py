"""Any lines at all in an input file: each becomes a prompt or a named failure, and none takes its neighbours with it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.datasets.inputs import BrokenRecord, InputRecord, open_input
from layertap.errors import LayertapError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["prompt", "text", "messages", "conversations", "prompt_token_ids", "id", "role", "content", "tools"]
)
LINES = st.one_of(
    st.binary(max_size=60).map(lambda raw: raw.replace(b"\n", b"").replace(b"\r", b"")),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(FIELDS, VALUES, max_size=4).map(lambda row: json.dumps(row).encode()),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tmp_path_factory.mktemp("inputs") / "prompts.jsonl"


@given(st.lists(LINES, max_size=6))
@settings(deadline=None, max_examples=150)
def test_lines_of_jsonl_are_prompts_or_named_failures(source, lines):
    good = json.dumps({"prompt": "a good one"}).encode()
    source.write_bytes(b"\n".join([*lines, good]) + b"\n")
    records = list(open_input(source))
    assert [record.index for record in records] == list(range(len(records)))
    last = records[-1]
    assert isinstance(last, InputRecord)
    assert last.prompt == type(last.prompt)("a good one") or "a good one" in str(last.prompt)
    for record in records:
        if isinstance(record, BrokenRecord):
            assert isinstance(record.error, LayertapError)
            assert source.name in str(record.error)


@pytest.mark.parametrize("line", ["[" * 100_000, '{"prompt":' * 50_000, '{"prompt": ' + "9" * 10_000 + "}"])
def test_lines_made_to_break_parsers_fail_alone(source, line):
    source.write_text(line + "\n" + '{"prompt": "a good one"}\n')
    first, second = open_input(source)
    assert isinstance(first, BrokenRecord)
    assert isinstance(second, InputRecord)
