"""One tiny model, one engine and one server for all tests of this folder; the oracle is plain transformers."""

import functools

import httpx
import openai
import pytest
import torch
from captures import KEYS

from layertap import AsyncLLM
from layertap.serving.server import run_background
from layertap.serving.settings import ServerSettings
from layertap.testing import oracle, zoo

LAYERS = (1, 2, 4)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return zoo.save("llama", tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def reference():
    """The same weights in plain transformers."""
    return zoo.build("llama")


@pytest.fixture(scope="session")
def states_of(reference):
    """(token ids, layers) -> hidden states of the oracle."""

    @functools.cache
    def run(token_ids, layers=LAYERS):
        return oracle.hidden_states(reference, list(token_ids), list(layers))

    return lambda token_ids, layers=LAYERS: run(tuple(int(t) for t in token_ids), tuple(layers))


@pytest.fixture(scope="session")
def check_rows(states_of):
    """Compare loaded states with the oracle: tokens one to one, rows within float32's tolerance."""

    def check(states, token_ids, layers=LAYERS, first=0, last=None):
        rows = slice(first, last)
        expected = states_of(token_ids, layers)[rows]
        assert states["token_ids"].tolist() == list(token_ids)[rows]
        error = (states["hidden_states"] - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)
        assert states["hidden_states"].shape == expected.shape
        assert float(error.max()) < 1e-4

    return check


@pytest.fixture(scope="session")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="session")
def make_llm(checkpoint):
    """Load the model with a store; closed at the end of the session."""
    opened = []

    def make(folder, **options):
        torch.set_num_threads(1)
        extra = {"shared_storage_path": str(folder), "min_free_bytes": 0, **options}
        llm = AsyncLLM(
            str(checkpoint),
            layers=LAYERS,
            kv_transfer_config={"kv_connector": "HiddenStatesConnector", "kv_connector_extra_config": extra},
        )
        opened.append(llm)
        return llm

    yield make
    for llm in opened:
        llm.close()


@pytest.fixture(scope="session")
def llm(make_llm, storage):
    return make_llm(storage, ttl_seconds=3600.0)


@pytest.fixture(scope="session")
def server(llm):
    settings = ServerSettings(served_model_names=("tiny", "alias"), allow_delete=True)
    with run_background(llm.front, settings) as running:
        yield running


@pytest.fixture(scope="session")
def keyed(llm):
    """The same engine behind two API keys."""
    with run_background(
        llm.front, ServerSettings(served_model_names=("tiny",), api_keys=KEYS, allow_delete=True)
    ) as up:
        yield up


@pytest.fixture(scope="session")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made
