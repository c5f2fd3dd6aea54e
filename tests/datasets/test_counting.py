import pyarrow as pa
import pyarrow.parquet as pq

from layertap.datasets import counting
from layertap.datasets.counting import estimate_records
from layertap.datasets.inputs import open_input


def test_lines_and_rows_are_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n{broken\n  \n{"prompt": "c"}')
    assert estimate_records(open_input(path)) == len(list(open_input(path))) == 3
    assert estimate_records(open_input(path, limit=2)) == 2
    assert estimate_records(open_input(path, format="text")) == 3
    assert estimate_records(open_input(path, format="text", text_unit="paragraph")) is None
    pq.write_table(pa.table({"prompt": ["a"] * 7}), tmp_path / "a.parquet")
    assert estimate_records(open_input(tmp_path / "a.parquet")) == 7
    (tmp_path / "b.parquet").write_bytes(b"nonsense")
    assert estimate_records(open_input(tmp_path / "b.parquet")) is None


def test_big_files_are_estimated_from_their_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(counting, "_COUNTED_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "abc"}\n' * 10_000)
    assert abs(estimate_records(open_input(path)) - 10_000) < 300
