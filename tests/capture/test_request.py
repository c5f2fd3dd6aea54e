import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.capture.options import StoreOptions
from layertap.capture.request import RequestOptions, Window
from layertap.errors import OptionError


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"include_output_token": True}, "unknown option 'include_output_token'; did you mean 'include_output_tokens'"),
        ({"include_output_tokens": "true"}, "include_output_tokens: expected true or false, got str 'true'"),
        ({"positions": "first"}, "positions: expected 'last', 'output' or"),
        ({"positions": [3, 3]}, "0 <= a < b"),
        ({"positions": [-1, 3]}, "0 <= a < b"),
        ({"positions": [True, 3]}, "positions: expected"),
        ({"layers": 1.5}, "layers: expected layer ids"),
        ({"save_dtype": "bfloat"}, "did you mean 'bfloat16'"),
        ({"tag": "../x"}, "tag: expected at most 128 letters"),
        ({"tag": ".hidden"}, "tag: expected"),
        ({"tag": "x" * 129}, "tag: expected"),
        ({"tag": ""}, "tag: expected a string"),
        ({"hidden_states_path": "a\0b"}, "hidden_states_path: expected a string"),
        ({"overwrite": 1}, "overwrite: expected true or false"),
        ([], "expected a mapping"),
    ],
)
def test_bad_request_options_name_the_key_and_the_way_out(params, message):
    with pytest.raises(OptionError, match=message):
        RequestOptions.parse(params)


def test_where_others_share_the_field_only_near_misses_are_refused():
    assert RequestOptions.parse({"do_remote_decode": True}, foreign_keys_allowed=True) == RequestOptions()
    with pytest.raises(OptionError, match="did you mean 'positions'"):
        RequestOptions.parse({"position": "last"}, foreign_keys_allowed=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"shared_storage": "/x"}, "did you mean 'shared_storage_path'"),
        ({"num_writer_threads": 0}, "at least 1"),
        ({"allow_custom_save_path": ["relative"]}, "absolute folders"),
        ({"allow_custom_save_path": "yes"}, "expected true, false or a list"),
        ({"ttl_seconds": -1}, "positive number of seconds"),
        ({"max_bytes_in_flight": "1g"}, "whole number"),
    ],
)
def test_bad_store_options_name_the_key(config, message):
    with pytest.raises(OptionError, match=message):
        StoreOptions.parse(config)


def test_defaults_of_the_store_are_the_documented_ones():
    options = StoreOptions.parse(None)
    assert (options.shared_storage_path, options.allow_custom_save_path) == ("/tmp", False)
    assert (options.num_writer_threads, options.use_synchronization_lock) == (8, True)
    assert options.min_free_bytes == 1 << 30


windows = st.builds(
    lambda positions, include: Window(positions=positions, include_output=include or positions == "output"),
    st.one_of(
        st.none(),
        st.sampled_from(["last", "output"]),
        st.tuples(st.integers(0, 12), st.integers(1, 12)).map(lambda ab: (ab[0], ab[0] + ab[1])),
    ),
    st.booleans(),
)


@given(windows, st.integers(1, 10), st.integers(0, 10), st.data())
def test_what_is_owed_was_a_candidate_and_exists(window, prompt_len, max_tokens, data):
    """Whatever a run ends with, the owed rows are among those that were announced, and none is the last sampled token."""
    try:
        window.admit(prompt_len, max_tokens)
    except OptionError:
        assert window.positions[1] > (
            max(prompt_len, prompt_len + max_tokens - 1) if window.include_output else prompt_len
        )
        return
    generated = data.draw(st.integers(min(1, max_tokens), max_tokens))
    total = prompt_len + generated
    try:
        owed = window.owed(prompt_len, total)
    except OptionError:
        assert window.include_output
        assert window.positions[1] > max(prompt_len, total - 1)
        return
    candidates = window.candidates(prompt_len, max_tokens)
    assert set(owed) <= set(candidates)
    limit = total - 1 if generated else total
    assert all(position < limit for position in owed)
    if not window.include_output:
        assert all(position < prompt_len for position in owed)
