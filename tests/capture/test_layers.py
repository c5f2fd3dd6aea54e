import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.capture.layers import resolve_layers, select_slots
from layertap.errors import LayerError


@pytest.mark.parametrize(
    ("layers", "num_layers", "expected"),
    [
        ("eagle3", 36, (2, 18, 33)),
        ("eagle3+last", 36, (2, 18, 33, 36)),
        ("dflash", 36, (2, 10, 18, 26, 34)),
        ("dflash:3", 36, (2, 18, 34)),
        ("all", 3, (0, 1, 2, 3)),
        ("last", 30, (30,)),
        ("1-4", 30, (1, 2, 3, 4)),
        ("5, 1,-1", 30, (5, 1, 30)),
        ("[5, 1, -1]", 30, (5, 1, 30)),
        ([-1, 0, "7"], 30, (30, 0, 7)),
        (4, 30, (4,)),
    ],
)
def test_ids_and_presets_resolve_in_the_callers_order(layers, num_layers, expected):
    assert resolve_layers(layers, num_layers) == expected


@given(st.integers(4, 200), st.integers(2, 12))
def test_dflash_is_the_documented_formula(num_layers, count):
    expected = [round(1 + i * (num_layers - 4) / (count - 1)) + 1 for i in range(count)]
    if len(set(expected)) < count:
        with pytest.raises(LayerError, match="too shallow"):
            resolve_layers(f"dflash:{count}", num_layers)
    else:
        assert list(resolve_layers(f"dflash:{count}", num_layers)) == expected


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([1, 2, 31], "layer 31 doesn't exist: the model has 30 blocks"),
        ([-32], "layer -32 doesn't exist"),
        ([3, 3], "layer 3 stands twice"),
        ([30, -1], "layer 30 stands twice.*-1 is 30"),
        ("eagel3", "did you mean 'eagle3'"),
        ("", "no layer was given"),
        ([], "no layer was given"),
        ("4-1", "runs backwards"),
        ("1-999999999999", "doesn't exist"),
        ([1.5], "expected an id"),
        ([True], "expected an id"),
        (True, "expected ids"),
        (None, "expected ids"),
        ("12.mlp_out", "not the site 'mlp_out'"),
        ("1.5", "'1.5' is neither an id nor a preset"),
        ("dflash:1", "at least 2"),
    ],
)
def test_bad_layers_are_refused_with_the_reason(layers, message):
    with pytest.raises(LayerError, match=message):
        resolve_layers(layers, 30)


def test_a_preset_that_a_shallow_model_cannot_give_says_so():
    with pytest.raises(LayerError, match="too shallow"):
        resolve_layers("eagle3", 4)


def test_a_request_can_only_take_what_the_server_captures():
    assert select_slots([18, 2], (2, 18, 33), 36) == (18, 2)
    with pytest.raises(LayerError, match=r"\[5\] are not captured"):
        select_slots([2, 5], (2, 18, 33), 36)
