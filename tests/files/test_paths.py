import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.capture.options import StoreOptions
from layertap.errors import OptionError
from layertap.files.paths import new_request_id, safe_name, target_path
from layertap.files.tags import read_tag, reserve_tag

TRICKS = [
    "..",
    "../x",
    "/etc/passwd",
    "a/../../b",
    "a\0b",
    "",
    ".",
    ".hidden",
    "x" * 5000,
    "\ud800",
    "a\nb",
    "%2F..%2F",
    "C:\\x",
    "é" * 300,
]


@given(st.one_of(st.sampled_from(TRICKS), st.text(max_size=400)))
def test_no_request_id_can_leave_the_folder(request_id):
    options = StoreOptions(shared_storage_path="/store")
    path = target_path(options, request_id, None)
    assert str(path.parent) == "/store"
    assert os.path.normpath(path) == str(path)
    assert path.name.endswith(".safetensors")
    assert not path.name.startswith(".")
    assert len(os.fsencode(path.name)) < 220
    assert "\0" not in path.name


@given(st.text(max_size=300), st.text(max_size=300))
def test_distinct_ids_get_distinct_names(first, second):
    assert (safe_name(first) == safe_name(second)) == (first == second)


def test_made_ids_do_not_repeat():
    assert len({new_request_id() for _ in range(1000)}) == 1000


def test_a_path_of_the_client_is_ignored_with_a_warning_unless_allowed(tmp_path, caplog):
    options = StoreOptions(shared_storage_path=str(tmp_path))
    assert target_path(options, "r", "/etc/x.safetensors") == tmp_path / "r.safetensors"
    assert "is ignored: allow_custom_save_path is off" in caplog.text


def test_allowed_folders_are_the_limit_with_links_resolved(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    options = StoreOptions(allow_custom_save_path=(str(inside),))
    assert target_path(options, "r", str(inside / "sub" / "a.safetensors")) == inside / "sub" / "a.safetensors"
    for trick in (
        outside / "a",
        inside / ".." / "out" / "a",
        inside / "link" / "a",
        str(inside) + "-other/a",
        "relative",
    ):
        with pytest.raises(OptionError, match="outside the allowed folders"):
            target_path(options, "r", str(trick))
    with pytest.raises(OptionError, match="is a folder"):
        target_path(options, "r", str(inside))


def test_true_means_anywhere(tmp_path):
    options = StoreOptions(allow_custom_save_path=True)
    assert target_path(options, "r", str(tmp_path / "b.safetensors")) == tmp_path / "b.safetensors"


@pytest.mark.parametrize("allowed", [True, "folder"])
@pytest.mark.parametrize(
    "name",
    ["a.safetensors.lock", "a.safetensors.error", ".a.layertap-tmp", "a.quarantined", "tags/a.json", "link/k/a.x"],
)
def test_what_the_store_itself_writes_beside_files_cannot_be_named(tmp_path, name, allowed):
    (tmp_path / "tags").mkdir()
    (tmp_path / "link").symlink_to("tags")
    options = StoreOptions(
        shared_storage_path=str(tmp_path), allow_custom_save_path=True if allowed is True else (str(tmp_path),)
    )
    with pytest.raises(OptionError, match="hidden_states_path: .* take a"):
        target_path(options, "r", str(tmp_path / name))


def test_a_tag_is_taken_once(tmp_path):
    handles = [{"hidden_states_path": "/x", "hidden_states_id": "r"}]
    reserve_tag(str(tmp_path), "mine", "r", handles)
    assert read_tag(str(tmp_path), "mine") == {"tag": "mine", "request_id": "r", "handles": handles}
    with pytest.raises(OptionError, match="'mine' is taken"):
        reserve_tag(str(tmp_path), "mine", "other", [])
    assert read_tag(str(tmp_path), "other") is None
    assert os.listdir(tmp_path / "tags") == ["mine.json"]
