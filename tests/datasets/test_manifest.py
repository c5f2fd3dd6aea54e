import json
from dataclasses import replace

import pytest
from dataset_cases import IDENTITY, make_manifest

from layertap.datasets.manifest import Manifest, read_manifest
from layertap.errors import CorruptError, ForeignError, HiddenStatesError, MissingError, OptionError


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    manifest = make_manifest()
    (tmp_path / "manifest.json").write_bytes(manifest.to_json())
    assert read_manifest(tmp_path) == manifest
    assert make_manifest().id != manifest.id


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"layers": (1, 2)}, "layers: the data set has [0, 3], this run [1, 2]"),
        ({"revision": None}, 'revision: the data set has "abc", this run none'),
        ({"tokenizer_hash": "u"}, 'tokenizer_hash: the data set has "t", this run "u"'),
        ({"save_dtype": "bfloat16"}, 'save_dtype: the data set has "float32", this run "bfloat16"'),
        ({"engine_version": "5.20.0"}, 'engine_version: the data set has "5.19.0", this run "5.20.0"'),
        ({"options": {"max_model_len": 32, "field": None}}, "options.max_model_len: the data set has 64, this run 32"),
        ({"options": {"max_model_len": 64}}, None),
    ],
)
def test_every_difference_is_said(tmp_path, change, line):
    if line is None:
        assert list(make_manifest().differences(make_manifest(**change))) == []
        return
    with pytest.raises(OptionError) as caught:
        make_manifest().refuse_unless_same(make_manifest(**change), tmp_path)
    assert f"  {line}\n" in str(caught.value)


def test_every_field_of_the_identity_is_compared():
    base = make_manifest()
    for name in type(IDENTITY).__dataclass_fields__:
        value = {"layers": (7,), "options": {"x": 1}}.get(name, 99)
        assert list(base.differences(make_manifest(**{name: value}))), name
    assert list(base.differences(make_manifest("files")))
    assert list(base.differences(replace(base, input_name="other.jsonl")))


def test_a_moved_model_is_the_same_if_its_files_are():
    here = make_manifest(model="/a/tiny", model_fingerprint="f")
    assert list(here.differences(make_manifest(model="/b/tiny", model_fingerprint="f"))) == []
    assert list(here.differences(make_manifest(model="/b/tiny", model_fingerprint="g")))


def test_damage_and_strangers_are_told_apart(tmp_path):
    with pytest.raises(MissingError, match="doesn't exist"):
        read_manifest(tmp_path / "nothing")
    with pytest.raises(MissingError, match="no data set"):
        read_manifest(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text("{}")
    with pytest.raises(ForeignError, match="not the manifest"):
        read_manifest(tmp_path)
    with pytest.raises(ForeignError, match="found a file"):
        read_manifest(path)
    body = json.loads(make_manifest().to_json())
    path.write_text(json.dumps({**body, "format_version": 4}))
    with pytest.raises(ForeignError, match="format version 4"):
        read_manifest(tmp_path)


def test_no_flipped_bit_goes_unnoticed(tmp_path):
    manifest = make_manifest()
    content = manifest.to_json()
    path = tmp_path / "manifest.json"
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        try:
            read: Manifest | None = read_manifest(tmp_path)
        except HiddenStatesError:
            read = None
        # white space may change, nothing else
        assert read in (None, manifest)
    path.write_bytes(content[:-20])
    with pytest.raises(CorruptError):
        read_manifest(tmp_path)
