"""What vLLM's own, finished configuration is refused for, and what is read from it."""

import checkpoints
import pytest

CONNECTOR = {
    "kv_connector": "HiddenStatesConnector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"layers": [1]},
}


@pytest.fixture(scope="module")
def make_config(checkpoint_folder):
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    path = checkpoints.save("llama", checkpoint_folder)

    def make(connector=CONNECTOR, **options):
        return EngineArgs(
            model=str(path),
            dtype="float32",
            max_model_len=256,
            enforce_eager=True,
            seed=0,
            kv_transfer_config=None if connector is None else KVTransferConfig(**connector),
            **options,
        ).create_engine_config()

    return make


def start(config):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from layertap.engines.vllm.connector import HiddenStatesConnector

    return HiddenStatesConnector(config, KVConnectorRole.SCHEDULER)


def choose_executor(config):
    """A step of the front end: nothing is loaded, no process started yet. (vLLM takes it when it makes a configuration, too.)"""
    from vllm.v1.executor.abstract import Executor

    from layertap.engines.vllm.activate import activate

    activate()
    return Executor.get_class(config)


def test_what_can_be_run_is_taken(make_config):
    config = make_config()
    choose_executor(config)
    assert start(config)._desk.configured.layers == (1,)


def test_the_compile_caches_key_depends_on_the_layers_and_not_on_where_files_go(make_config, tmp_path):
    from layertap.engines.vllm.activate import activate

    activate()

    def key(**extra):
        found = {**CONNECTOR, "kv_connector_extra_config": {**CONNECTOR["kv_connector_extra_config"], **extra}}
        return make_config(found).compute_hash()

    plain = make_config(None).compute_hash()
    assert len({plain, key(), key(layers=[2]), key(layers=[1, 2])}) == 4
    assert key(shared_storage_path=str(tmp_path)) == key()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_sharing_fast_prefill": True}, r"kv_sharing_fast_prefill: its later layers see only some rows$"),
        ({"runner": "pooling"}, r"a pooling model: there is nothing to generate$"),
    ],
)
def test_a_configuration_that_cant_be_supported_is_refused_with_one_sentence(make_config, options, message):
    from layertap.errors import EngineError

    with pytest.raises(EngineError, match=f"^hidden states can't be taken with {message}"):
        choose_executor(make_config(**options))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("enable_dbo", True, r"dual-batch overlap .*: a block sees only a part of the batch$"),
        ("ubatch_size", 2, r"dual-batch overlap .*: a block sees only a part of the batch$"),
        ("prefill_context_parallel_size", 2, r"prefill context parallelism: a rank sees only a part of the tokens$"),
    ],
)
def test_parallelism_that_splits_a_batch_is_refused(make_config, name, value, message):
    from layertap.errors import EngineError

    config = make_config()
    # the CPU build takes it back, or refuses it itself: put it where a GPU's configuration has it
    setattr(config.parallel_config, name, value)
    for step in (choose_executor, start):
        with pytest.raises(EngineError, match=f"^hidden states can't be taken with {message}"):
            step(config)


def test_drafts_that_are_shared_out_on_the_gpu_are_refused(make_config):
    from layertap.errors import EngineError

    config = make_config(
        speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
    )
    choose_executor(config)
    config.speculative_config.enable_adaptive_verification = True  # vLLM takes it with one method only, on a GPU
    for step in (choose_executor, start):
        with pytest.raises(
            EngineError, match="with adaptive verification of drafts: which rows are whose is decided on the"
        ):
            step(config)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"layers": [9]}, "layer 9 doesn't exist"),
        ({"layer": [1]}, "did you mean 'layers'"),
        ({"layers": [1], "prefix_rows_bytes": 100}, "don't hold one block's rows"),
        ({"num_writer_processes": 2, "max_storage_bytes": 1 << 30}, "2 can't be had with max_storage_bytes"),
    ],
)
def test_bad_options_of_the_server_are_refused_before_anything_is_loaded(make_config, extra, message):
    with pytest.raises(ValueError, match=message):  # vLLM wraps it where its configuration is made
        choose_executor(make_config({**CONNECTOR, "kv_connector_extra_config": extra}))


def test_another_version_is_refused_before_anything_is_loaded(make_config, monkeypatch):
    from layertap.engines.vllm import compat
    from layertap.errors import EngineError

    config = make_config()
    monkeypatch.setattr(compat, "version", lambda: "0.34.1")
    with pytest.raises(EngineError, match=r"0\.26 up to, not including, 0\.34; found 0\.34\.1"):
        choose_executor(config)
    choose_executor(make_config(None))  # which is no concern of ours where the connector isn't configured


@pytest.mark.parametrize(("found", "refused"), [("0.26.0", True), ("0.27.1", False), ("0.32.0", False)])
def test_prefix_hits_without_rows_are_refused_where_they_cant_be_prevented(monkeypatch, found, refused):
    from contextlib import nullcontext
    from types import SimpleNamespace

    from layertap.engines.vllm import compat
    from layertap.errors import EngineError

    monkeypatch.setattr(compat, "version", lambda: found)
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=True), cache_config=SimpleNamespace(enable_prefix_caching=True)
    )
    with pytest.raises(EngineError, match="turn prefix caching off") if refused else nullcontext():
        compat.check_shared_prefix_cache(config)


def test_a_replica_is_named_also_where_vllm_calls_each_rank_0(make_config):
    from layertap.engines.vllm import compat

    config = make_config()
    assert compat.replica(config) == 0
    if not hasattr(config.parallel_config, "reconfigure_for_independent_dp_rank"):
        pytest.skip("this vLLM doesn't renumber ranks")
    # what vLLM does in each engine process of a model without experts
    config.parallel_config.data_parallel_index = 1
    config.parallel_config.reconfigure_for_independent_dp_rank()
    assert config.parallel_config.data_parallel_rank == 0
    assert compat.replica(config) == 1


def multi(*children):
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def test_inside_of_multiconnector_other_connectors_keys_are_left_alone(make_config):
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from layertap.engines.vllm.configured import configured, prepare

    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}
    config = make_config(multi(other, {**CONNECTOR, "kv_connector_extra_config": {"layers": [1, 2]}}))
    prepare(config)
    shown = [part for cls, part in MultiConnector._get_connector_classes_and_configs(config)][1]
    for seen in (config, shown):
        found = configured(seen)
        assert (found.shared, found.layers) == (True, (1, 2))
    assert configured(make_config()).shared is False


def test_the_documented_layers_reach_the_connector_inside_of_multiconnector(make_config):
    from layertap.engines.vllm.configured import configured, prepare

    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}
    ours = {"kv_connector": "HiddenStatesConnector", "kv_role": "kv_producer"}
    config = make_config(
        multi(other, ours),
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [3, 1]}},
        },
    )
    prepare(config)
    assert config.speculative_config is None
    assert configured(config).layers == (3, 1)
