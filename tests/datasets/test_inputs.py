import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.datasets import inputs, json_array
from layertap.datasets.conversations import ChatPrompt, TextPrompt, TokenPrompt
from layertap.datasets.inputs import BrokenRecord, InputRecord, open_input
from layertap.errors import OptionError, PromptError

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT}),
    min_size=1,
    max_size=3,
)
ROWS = st.one_of(
    st.fixed_dictionaries({"prompt": TEXT}),
    st.fixed_dictionaries({"prompt_token_ids": st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)}),
    st.fixed_dictionaries({"messages": MESSAGES, "id": TEXT}),
)


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def prompt_of(row):
    if "prompt" in row:
        return TextPrompt(row["prompt"])
    if "prompt_token_ids" in row:
        return TokenPrompt(tuple(row["prompt_token_ids"]))
    return ChatPrompt(tuple(row["messages"]))


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, max_size=8), st.sampled_from(["\n", "\r\n", "\n\n", "\n \n"]), st.booleans())
def test_jsonl_gives_every_row_in_order(rows, ending, ascii_only):
    with tempfile.TemporaryDirectory() as folder:
        text = ending.join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
        records = list(open_input(written(Path(folder), "a.jsonl", text)))
    assert [record.prompt for record in records] == [prompt_of(row) for row in rows]
    assert [record.index for record in records] == list(range(len(rows)))
    assert [record.sample_id for record in records] == [row.get("id") for row in rows]


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, max_size=8), st.sampled_from([None, 1]), st.integers(1, 50))
def test_a_json_array_gives_the_same_as_jsonl_whatever_the_chunks(rows, indent, chunk):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_CHUNK_BYTES", chunk)
        path = written(Path(folder), "a.json", json.dumps(rows, indent=indent, ensure_ascii=False))
        records = list(open_input(path))
        lines = written(Path(folder), "a.jsonl", "\n".join(json.dumps(row) for row in rows))
        hashes = [record.source_hash for record in open_input(lines)]
    assert [record.prompt for record in records] == [prompt_of(row) for row in rows]
    assert [record.source_hash for record in records] == hashes


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(TEXT, st.none()), min_size=1, max_size=8), st.lists(MESSAGES, min_size=1, max_size=4))
def test_parquet_gives_every_row_and_its_hash_is_that_of_jsonl(texts, chats):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.parquet"
        pq.write_table(pa.table({"prompt": pa.array(texts, pa.string()), "other": [1] * len(texts)}), path)
        records = list(open_input(path))
        chat_path = Path(folder) / "b.parquet"
        pq.write_table(pa.table({"messages": chats}), chat_path)
        chat_records = list(open_input(chat_path))
        lines = written(Path(folder), "b.jsonl", "\n".join(json.dumps({"messages": chat}) for chat in chats))
        hashes = [record.source_hash for record in open_input(lines)]
    assert len(records) == len(texts)
    for record, text in zip(records, texts, strict=True):
        if text is None:
            assert isinstance(record, BrokenRecord)
            assert f"a.parquet row {record.index}: there is no prompt" in str(record.error)
        else:
            assert record.prompt == TextPrompt(text)
    assert [record.source_hash for record in chat_records] == hashes


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=200), st.sampled_from(["jsonl", "json", "text"]), st.sampled_from(["line", "paragraph", "file"])
)
def test_any_bytes_give_records_or_say_what_is_broken(content, kind, unit):
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), "a", content)
        records = list(open_input(path, format=kind, text_unit=unit))
    assert [record.index for record in records] == list(range(len(records)))
    lines = [line for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    if kind == "jsonl" or (kind == "text" and unit == "line"):
        assert len(records) == len(lines)
    elif kind == "text":
        assert bool(records) == bool(lines)
    for record in records:
        assert isinstance(record, InputRecord) or f"{path} line " in str(record.error)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=5), st.data())
def test_a_cut_array_gives_what_stands_before_the_cut_and_says_where_it_broke(rows, data):
    text = json.dumps(rows)
    cut = data.draw(st.integers(1, len(text) - 1))
    with tempfile.TemporaryDirectory() as folder:
        *good, last = open_input(written(Path(folder), "a.json", text[:cut]))
    assert isinstance(last, BrokenRecord)
    assert "line 1 column" in str(last.error)
    assert [record.prompt for record in good] == [prompt_of(row) for row in rows[: len(good)]]
    ends = [len(json.dumps(rows[: count + 1])) - 1 for count in range(len(rows))]
    assert len(good) >= sum(end < cut for end in ends)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_byte_order_mark_is_no_content(tmp_path, ending):
    row = '{"prompt": "a"}'
    for lines in ([row], ["", row], ["  ", row, ""]):
        (record,) = open_input(written(tmp_path, "a.jsonl", ending.join(["\ufeff" + lines[0], *lines[1:]])))
        assert (record.prompt, record.where[-6:]) == (TextPrompt("a"), f"line {lines.index(row) + 1}")
    for unit in ("line", "paragraph", "file"):
        (record,) = open_input(written(tmp_path, "a.txt", "\ufeffb"), text_unit=unit)
        assert record.prompt == TextPrompt("b")
        assert not list(open_input(written(tmp_path, "b.txt", f"\ufeff{ending} "), text_unit=unit))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_the_longest_record_is_whole_and_a_longer_one_is_refused_with_a_mark_or_without(tmp_path, monkeypatch, mark):
    monkeypatch.setattr(inputs, "MAX_RECORD_BYTES", 64)
    for unit in ("line", "file"):
        (record,) = open_input(written(tmp_path, "a.txt", mark + b"x" * 61), text_unit=unit)
        assert record.prompt == TextPrompt("x" * 61)
        for size in (65, 66, 67, 68, 200):
            (record,) = open_input(written(tmp_path, "a.txt", mark + b"x" * size), text_unit=unit)
            assert isinstance(record, BrokenRecord)
            assert "is longer than" in str(record.error)


def test_a_compressed_file_is_not_taken_for_text(tmp_path):
    path = written(tmp_path, "a.jsonl.gz", b"\x1f\x8b")
    with pytest.raises(PromptError, match=r"a\.jsonl\.gz: is compressed"):
        open_input(path)
    assert open_input(path, format="text").format == "text"


def test_nulls_of_parquet_are_those_of_the_columns_type(tmp_path):
    def chat(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return [{"role": "assistant", "content": "a", "tool_calls": [call]}]

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": [chat({"x": 1}), chat({"y": 2})]}), path)
    assert [record.prompt for record in open_input(path)] == [
        ChatPrompt(tuple(chat(one))) for one in ({"x": 1}, {"y": 2})
    ]


def test_a_broken_line_is_named_with_line_and_column_and_the_others_are_read(tmp_path):
    path = written(tmp_path, "a.jsonl", '{"prompt": "a"}\n\n{"prompt": }\n{"prompt": "c"}\n[1]\n')
    first, broken, third, wrong = open_input(path)
    assert (first.prompt, third.prompt) == (TextPrompt("a"), TextPrompt("c"))
    assert str(broken.error).startswith(f"{path} line 3 column 12: broken JSON: Expecting value")
    assert str(wrong.error).startswith(f"{path} line 5: expected an object")
    assert [record.index for record in (first, broken, third, wrong)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "\xff"}', r"line 1 column 13 \(in bytes\): not UTF-8"),
        (b"[" * 100_000, "line 1: broken JSON: nested too deeply"),
        (b'{"prompt_token_ids": [' + b"9" * 5000 + b"]}", "line 1: "),
        (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
        (b'{"prompt_token_ids": [NaN]}', "expected a token id"),
        (b'{"messages": [{"role": "user", "content": "' + b"x" * 3000 + b'"}]}', "longer than"),
    ],
)
def test_hostile_lines_are_refused_one_by_one(tmp_path, monkeypatch, line, message):
    if "longer" in message:
        monkeypatch.setattr(inputs, "MAX_RECORD_BYTES", 1000)
    broken, good = open_input(written(tmp_path, "a.jsonl", line + b'\n{"prompt": "next"}'))
    assert isinstance(broken, BrokenRecord)
    with pytest.raises(PromptError, match=message):
        raise broken.error
    assert good.prompt == TextPrompt("next")


def test_text_is_a_prompt_a_line_or_a_paragraph_or_the_file(tmp_path):
    path = written(tmp_path, "a.txt", b"\xef\xbb\xbfone\r\n two \n\n\n  \nthree\n")

    def prompts(unit):
        return [(record.prompt.text, record.where.rpartition(" ")[2]) for record in open_input(path, text_unit=unit)]

    assert prompts("line") == [("one", "1"), (" two ", "2"), ("three", "6")]
    assert prompts("paragraph") == [("one\n two ", "1"), ("three", "6")]
    assert prompts("file") == [("one\r\n two \n\n\n  \nthree\n", "1")]


def test_the_limit_counts_records_and_reading_again_starts_again(tmp_path):
    source = open_input(written(tmp_path, "a.jsonl", '{"prompt": "a"}\n{}\n{"prompt": "c"}\n'), limit=2)
    assert [record.index for record in source] == [0, 1]
    assert [record.index for record in source] == [0, 1]


def test_reading_is_lazy(tmp_path):
    path = written(tmp_path, "a.jsonl", '{"prompt": "a"}\n' * 200_000)
    records = iter(open_input(path))
    next(records)
    with path.open("r+b") as file:
        file.truncate(1 << 20)
    assert 1000 < sum(1 for _ in records) < 199_000


def test_options_that_dont_exist_and_files_that_arent_there_are_refused(tmp_path):
    path = written(tmp_path, "a.jsonl", "")
    assert list(open_input(path)) == []
    for option in ({"format": "csv"}, {"field": "text"}, {"text_unit": "word"}, {"limit": 0}):
        with pytest.raises(OptionError, match=next(iter(option))):
            open_input(path, **option)
    with pytest.raises(PromptError, match="no such input file"):
        open_input(tmp_path / "b.jsonl")
    with pytest.raises(PromptError, match="expected a file"):
        open_input(tmp_path)


def test_a_file_that_isnt_parquet_or_has_no_prompt_is_refused_with_what_it_has(tmp_path):
    with pytest.raises(PromptError, match=r"a\.parquet: can't be read as Parquet at row 0"):
        list(open_input(written(tmp_path, "a.parquet", b"nonsense")))
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "b.parquet")
    with pytest.raises(PromptError, match=r"no column is one of .*\(columns: text\)"):
        list(open_input(tmp_path / "b.parquet"))
