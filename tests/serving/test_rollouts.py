"""Training loops: rollouts with their states, logprobs and versions, and weights exchanged in between."""

import asyncio
import runpy
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch

from layertap.client import AsyncHiddenStatesClient, HiddenStatesClient, ServerError
from layertap.serving.server import run_background
from layertap.serving.settings import ServerSettings
from layertap.testing import oracle, zoo

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_rollouts.py"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("rl-store"), tmp_path_factory.mktemp("rl-checkpoints")


@pytest.fixture(scope="module")
def trained(make_llm, folders):
    llm = make_llm(folders[0])
    settings = ServerSettings(allow_delete=True, allow_weight_updates=(str(folders[1]),))
    with run_background(llm.front, settings) as running:
        yield running


def test_the_example_runs_and_every_step_has_its_own_weights(trained, checkpoint, folders):
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE), trained.url, str(checkpoint), str(folders[1])],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert [line.split(", ")[1] for line in lines] == ["weights as loaded", "weights step-1", "weights step-2"]
    assert len({line.split(", ")[2] for line in lines}) == 3
    assert not [path for path in folders[0].iterdir() if path.suffix == ".safetensors"]
    assert runpy.run_path(str(EXAMPLE))["GROUP"] == 8


def scaled(checkpoint_folder, factor):
    model = zoo.build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    model.save_pretrained(checkpoint_folder)
    return model


def test_no_request_runs_on_a_mixture_and_each_says_its_version(trained, folders):
    models = {f"v{i}": scaled(folders[1] / f"v{i}", 1 + i / 20) for i in range(1, 4)}

    enough = None

    async def rollouts(client, results):
        while enough is None or len(results) < enough:
            answer = await client.complete(
                "steady", n=2, max_tokens=6, logprobs=0, seed=len(results), ignore_eos=True, return_token_ids=True,
                kv_transfer_params={"include_output_tokens": True},
            )  # fmt: skip
            for choice in answer["choices"]:
                results.append((choice, await client.fetch_raw(choice), await client.fetch(choice)))

    async def work():
        nonlocal enough
        results = []
        async with AsyncHiddenStatesClient(trained.url) as client:
            await client.update_weights(folders[1] / "v1", "v1")
            loops = [asyncio.create_task(rollouts(client, results)) for _ in range(4)]
            for version in ("v2", "v3"):
                before = len(results)
                while len(results) < before + 15:
                    await asyncio.sleep(0.01)
                await client.update_weights(folders[1] / version, version)
            enough = len(results) + 15
            await asyncio.gather(*loops)
        return results

    results = asyncio.run(work())
    seen = set()
    for choice, loaded, states in results:
        version = loaded.info.facts["weights_version"]
        seen.add(version)
        tokens = choice["prompt_token_ids"] + choice["token_ids"]
        model = models[version]
        expected = oracle.hidden_states(model, tokens[:-1], [1, 2, 4])
        assert float((states["hidden_states"] - expected).abs().max()) < 1e-3
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, len(choice["prompt_token_ids"]) - 1 : -1]
        wanted = logits.float().log_softmax(-1).gather(1, torch.tensor(choice["token_ids"])[:, None])[:, 0]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(wanted.tolist(), abs=2e-3)
    assert seen == {"v1", "v2", "v3"}


def test_weights_that_are_not_allowed_or_not_of_this_model_change_nothing(trained, server, folders, tmp_path):
    def rows():
        with HiddenStatesClient(trained.url) as client:
            return client.fetch(client.complete("same", max_tokens=1)["choices"][0])["hidden_states"]

    before = rows()
    zoo.save("gpt2", folders[1])
    (folders[1] / "broken").mkdir()
    (folders[1] / "link").symlink_to(tmp_path)
    with HiddenStatesClient(trained.url) as client:
        for path, status in ((tmp_path, 403), (folders[1] / ".." / "x", 403), (folders[1] / "link", 403), ("a\0b", 400),
                             (folders[1] / "gpt2", 400), (folders[1] / "broken", 400), (folders[1] / "missing", 400)):  # fmt: skip
            with pytest.raises(ServerError) as caught:
                client.update_weights(path, "bad")
            assert caught.value.status == status, path
    assert torch.equal(before, rows())
    refused = httpx.post(f"{server.url}/v1/weights", json={"path": str(folders[1] / "v1"), "version": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "read_only")
