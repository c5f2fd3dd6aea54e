"""From what a user configures to a store, without a model."""

import pytest

from layertap.engines.base import ModelInfo
from layertap.errors import OptionError
from layertap.params import KVTransferConfig, SamplingParams
from layertap.setup import StoreConfig, check_engine_options, params_for_each

LONG = {"kv_connector": "HiddenStatesConnector"}
SPECULATIVE = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
}
INFO = ModelInfo(
    model="m", revision=None, num_layers=4, hidden_size=8, vocab_size=10, max_model_len=16, dtype="float32", device="cpu",
    engine="transformers", engine_version="0", generation_defaults={"temperature": 0.5},
)  # fmt: skip


class Engine:
    """Takes two options."""

    def __init__(self, model, *, dtype="auto", max_model_len=None):
        pass


def build(layers=None, storage=None, speculative_config=None, kv_transfer_config=None):
    return StoreConfig.build(layers, storage, speculative_config, kv_transfer_config)


def test_the_long_form_takes_its_layers_from_the_speculative_config():
    config = build(speculative_config=SPECULATIVE, kv_transfer_config=LONG)
    assert (config.layers, config.stores, config.options.shared_storage_path) == ((1, 2), True, "/tmp")


def test_objects_and_dicts_are_the_same():
    as_object = KVTransferConfig(kv_connector="ExampleHiddenStatesConnector", kv_role="kv_producer")
    assert build(kv_transfer_config=as_object).options == build(kv_transfer_config=LONG).options


def test_the_minimal_flags_work_with_the_preset():
    assert build(speculative_config={"method": "extract_hidden_states"}, kv_transfer_config=LONG).layers == "eagle3"


def test_the_short_form():
    config = build(layers="1-4", storage="/store")
    assert (config.layers, config.options.shared_storage_path, config.stores) == ("1-4", "/store", True)
    assert not build().stores


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": [3], "speculative_config": SPECULATIVE}, "given twice and differently"),
        ({"storage": "/a", "kv_transfer_config": LONG}, "storage: give the folder once"),
        ({"speculative_config": {"method": "ngram"}}, "no speculative decoding"),
        ({"speculative_config": {**SPECULATIVE, "num_spec": 1}}, "speculative_config: expected"),
        ({"kv_transfer_config": {"kv_connector": "NixlConnector"}}, "moves no hidden states"),
        ({"kv_transfer_config": {**LONG, "kv_role": "kv_consumer"}}, "expected 'kv_producer'"),
        ({"kv_transfer_config": {**LONG, "kv_conector": 1}}, "kv_transfer_config: expected"),
        (
            {"kv_transfer_config": {**LONG, "kv_connector_extra_config": {"shared_path": 1}}},
            "unknown option 'shared_path'",
        ),
        ({"kv_transfer_config": 5}, "expected KVTransferConfig"),
    ],
)
def test_bad_configurations_name_what_is_wrong(arguments, message):
    with pytest.raises(OptionError, match=message):
        build(**arguments)


def test_engine_options_that_cannot_be_honoured_are_named():
    assert check_engine_options(Engine, {"dtype": "float32", "tensor_parallel_size": 1}) == {"dtype": "float32"}
    with pytest.raises(OptionError, match="tensor_parallel_size: the embedded engine can't honour 2"):
        check_engine_options(Engine, {"tensor_parallel_size": 2})
    with pytest.raises(OptionError, match="max_model_length: .*did you mean 'max_model_len'"):
        check_engine_options(Engine, {"max_model_length": 2})
    with pytest.raises(OptionError, match="storge: .*did you mean 'storage'"):
        check_engine_options(Engine, {"storge": "x"})


def test_sampling_parameters_one_for_all_one_each_or_the_models():
    assert params_for_each(None, 2, INFO)[0].temperature == 0.5
    assert params_for_each({"max_tokens": 3}, 2, INFO)[1].max_tokens == 3
    each = params_for_each([SamplingParams(max_tokens=1), {"max_tokens": 2}], 2, INFO)
    assert [params.max_tokens for params in each] == [1, 2]
    with pytest.raises(OptionError, match="a list of 1 for 2 prompts"):
        params_for_each([SamplingParams()], 2, INFO)
    with pytest.raises(OptionError, match="expected SamplingParams"):
        params_for_each(5, 1, INFO)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 3.0}, r"temperature: expected a number in \[0, 2\], got 3"),
        ({"temperature": float("nan")}, "temperature: expected a finite number"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k: expected a whole number"),
        ({"n": 0}, "n: expected at least 1"),
        ({"n": 2, "temperature": 0}, "n: expected 1 with temperature 0"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1"),
        ({"min_tokens": 20}, "min_tokens: expected at most 16"),
        ({"stop": [""]}, "stop: expected texts"),
        ({"stop": "x", "detokenize": False}, "detokenize=True"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos: expected true or false"),
        ({"extra_args": {"kv_transfer_param": {}}}, "extra_args"),
        ({"logprobs": -2}, "logprobs"),
    ],
)
def test_bad_sampling_parameters_are_named(values, message):
    with pytest.raises(OptionError, match=message):
        SamplingParams(**values)


def test_vllms_normal_forms():
    params = SamplingParams(
        stop="a", seed=-1, logprobs=True, logit_bias={"5": 200.0}, stop_token_ids=[3, 3], temperature=1e-3
    )
    assert (params.stop, params.seed, params.logprobs, params.logit_bias, params.stop_token_ids) == (
        ["a"],
        None,
        1,
        {5: 100.0},
        [3],
    )
    assert params.temperature == 1e-2
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1)
    assert (greedy.greedy, greedy.top_p, greedy.top_k, greedy.min_p) == (True, 1.0, 0, 0.0)
