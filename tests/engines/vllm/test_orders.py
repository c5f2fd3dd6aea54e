"""From `kv_transfer_params` to an order: what is resolved, what is refused, where files of several choices go."""

import json

import pytest

from layertap.capture.options import StoreOptions
from layertap.engines.vllm.configured import Configured
from layertap.engines.vllm.orders import CHOICES_KEY, ID_KEY, PREFILL_KEY, Asked, OrderDesk
from layertap.errors import OptionError, TargetExistsError


def make_desk(storage, *, shared=False, **options):
    configured = Configured(
        options=StoreOptions(shared_storage_path=str(storage), **options),
        layers=(2, 4, 7),
        num_layers=8,
        hidden_size=16,
        dtype="bfloat16",
        shared=shared,
    )
    return OrderDesk(configured, max_model_len=100)


def asked(params=None, request_id="cmpl-1-abcdef12", prompt_len=10, max_tokens=20, has_token_ids=True):
    return Asked(
        request_id=request_id, params=params, prompt_len=prompt_len, max_tokens=max_tokens, has_token_ids=has_token_ids
    )


def test_without_options_all_the_servers_layers_of_the_prompt_are_owed(tmp_path):
    order = make_desk(tmp_path).order(asked())
    assert order.spec.layers == (2, 4, 7)
    assert order.spec.candidates == range(10)
    assert order.path == str(tmp_path / "cmpl-1-abcdef12.safetensors")


def test_a_requests_layers_are_some_of_the_servers_in_its_own_order(tmp_path):
    assert make_desk(tmp_path).order(asked({"layers": [7, 2]})).spec.layers == (7, 2)
    with pytest.raises(OptionError, match=r"\[3\] are not captured by this server, which captures \[2, 4, 7\]"):
        make_desk(tmp_path).order(asked({"layers": [3]}))


def test_generated_tokens_never_reach_past_the_models_length(tmp_path):
    order = make_desk(tmp_path).order(asked({"include_output_tokens": True}, prompt_len=90, max_tokens=10**9))
    assert order.spec.max_tokens == 10


def test_only_who_has_the_servers_secret_may_say_where_a_file_goes_and_whose_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERTAP_VLLM_FRONT", "secret")
    target = str(tmp_path / "elsewhere" / "x.safetensors")
    wishes = {"hidden_states_path": target, ID_KEY: "theirs", PREFILL_KEY: True}
    desk = make_desk(tmp_path / "store")
    for given in ({}, {"layertap_front": "guess"}, {"layertap_front": None}, {"layertap_front": ["secret"]}):
        order = desk.order(asked({**wishes, **given}))
        assert order.path == str(tmp_path / "store" / "cmpl-1-abcdef12.safetensors")
        assert (order.public_id, order.prefill) == ("cmpl-1-abcdef12", False)
    order = desk.order(asked({**wishes, "layertap_front": "secret"}))
    assert (order.path, order.public_id, order.prefill) == (target, "theirs", True)


def test_capture_is_the_requests_choice_before_the_servers(tmp_path):
    assert make_desk(tmp_path).order(asked({"capture": False})) is None
    assert make_desk(tmp_path, capture_by_default=False).order(asked()) is None
    assert make_desk(tmp_path, capture_by_default=False).order(asked({"capture": True})) is not None


def test_a_request_id_cant_leave_the_storage(tmp_path):
    order = make_desk(tmp_path).order(asked(request_id="../../etc/passwd"))
    assert order.path == str(tmp_path / "%2E.%2F..%2Fetc%2Fpasswd.safetensors")


def test_choices_of_one_request_get_files_of_their_own(tmp_path):
    desk = make_desk(tmp_path, allow_custom_save_path=True)
    params = {"hidden_states_path": str(tmp_path / "x.safetensors"), CHOICES_KEY: 3, ID_KEY: "mine", "tag": "t"}
    orders = [desk.order(asked(params, request_id=f"{choice}_cmpl-1")) for choice in range(3)]
    assert [order.path.removeprefix(str(tmp_path)) for order in orders] == [
        "/x.safetensors",
        "/x-0-1.safetensors",
        "/x-0-2.safetensors",
    ]
    assert [order.public_id for order in orders] == ["mine", "mine-0-1", "mine-0-2"]
    for order in orders:
        desk.reserve_tag(order, 3)
    record = json.loads((tmp_path / "tags" / "t.json").read_text())
    assert [handle["hidden_states_path"] for handle in record["handles"]] == [order.path for order in orders]


def test_an_id_that_merely_looks_like_a_choice_is_left_alone(tmp_path):
    desk = make_desk(tmp_path, allow_custom_save_path=True)
    order = desk.order(asked({"hidden_states_path": str(tmp_path / "x.safetensors")}, request_id="7_of_9"))
    assert order.path == str(tmp_path / "x.safetensors")


def test_prefill_owes_no_generated_token(tmp_path):
    order = make_desk(tmp_path).order(asked({PREFILL_KEY: True, "positions": "last"}))
    assert order.prefill
    assert order.spec.max_tokens == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"layer": [2]}, "did you mean 'layers'"),
        ({"positions": [0, 11]}, "outside"),
        ({"save_dtype": "int8"}, "save_dtype"),
        ({"tag": "../x"}, "tag"),
        ([1], "expected a mapping"),
    ],
)
def test_bad_options_are_refused_by_name(tmp_path, params, message):
    with pytest.raises(OptionError, match=message):
        make_desk(tmp_path).order(asked(params))


def test_prompts_without_tokens_are_refused(tmp_path):
    with pytest.raises(OptionError, match="embeddings"):
        make_desk(tmp_path).order(asked(has_token_ids=False))


def test_other_connectors_keys_are_left_alone_where_the_field_is_shared(tmp_path):
    desk = make_desk(tmp_path, shared=True)
    assert desk.order(asked({"do_remote_prefill": False})) is not None
    with pytest.raises(OptionError, match="did you mean 'positions'"):
        desk.order(asked({"position": "last"}))


def test_an_existing_file_or_tag_is_refused(tmp_path):
    desk = make_desk(tmp_path, allow_custom_save_path=True)
    (tmp_path / "there.safetensors").write_bytes(b"")
    params = {"hidden_states_path": str(tmp_path / "there.safetensors")}
    with pytest.raises(TargetExistsError, match="overwrite"):
        desk.order(asked(params))
    assert desk.order(asked({**params, "overwrite": True})) is not None
    first = desk.order(asked({"tag": "once"}))
    desk.reserve_tag(first)
    with pytest.raises(OptionError, match="taken"):
        desk.order(asked({"tag": "once"}, request_id="other"))
