"""The real trainers take training steps on our exports.

They aren't installed with the tests: each pins other releases of torch and transformers. docs/training.md says how to install
them; without them, tests/datasets/test_export*.py read the formats with readers of their own.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from layertap import LLM
from layertap.datasets.export.huggingface import export_datasets
from layertap.datasets.export.modelopt import export_modelopt
from layertap.datasets.export.saelens import export_saelens
from layertap.datasets.export.specforge import export_specforge
from layertap.datasets.export.speculators import export_speculators
from layertap.datasets.extraction import RunOptions, extract_dataset
from layertap.datasets.inputs import open_input
from layertap.datasets.reader import open_dataset
from layertap.testing import zoo

HERE = Path(__file__).parent


def needs(package):
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"{package} isn't installed; docs/training.md says how")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny model and the states of forty chats."""
    base = tmp_path_factory.mktemp("trainers")
    checkpoint = zoo.save("llama", base)
    with (base / "chats.jsonl").open("w") as file:
        for number in range(40):
            question = {"role": "user", "content": f"What is {number % 10} plus {number // 10}?"}
            answer = {"role": "assistant", "content": f"It is {number % 10 + number // 10}. Anything else?"}
            file.write(json.dumps({"id": f"c{number}", "messages": [question, answer]}) + "\n")
    with LLM(checkpoint, dtype="float32", device="cpu") as llm:
        report = extract_dataset(
            llm, open_input(base / "chats.jsonl"), base / "states", RunOptions(layers=[0, 1, 3, 4])
        )
    assert report.num_samples == 40
    return checkpoint, open_dataset(base / "states")


@needs("speculators")
def test_speculators_own_command_trains_on_the_export(made, tmp_path):
    checkpoint, states = made
    export_speculators(states, tmp_path / "data")
    command = [sys.executable, HERE / "speculators_on_cpu.py", "train"]
    command += [
        "--verifier-name-or-path",
        checkpoint,
        "--speculator-type",
        "eagle3",
        "--target-layer-ids",
        "0",
        "1",
        "3",
    ]
    command += ["--data-path", tmp_path / "data", "--on-missing", "raise", "--hidden-states-dtype", "float32"]
    command += ["--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--total-seq-len", "256"]
    command += ["--num-workers", "0", "--epochs", "6", "--ttt-steps", "1", "--log-freq", "1", "--lr", "0.003"]
    command += ["--mask-token-id", "3", "--save-path", tmp_path / "draft"]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    losses = [float(loss) for loss in re.findall(r"val/loss_epoch=([\d.e+-]+\d)", said)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    # every sample was taken as it is
    assert set(re.findall(r"train/error_records=([\d.e+-]+\d)", said)) == {"0.00e+00"}
    assert list((tmp_path / "draft").rglob("model.safetensors"))


@needs("specforge")
def test_specforge_reads_the_export_and_its_loss_falls(made, tmp_path, monkeypatch):
    checkpoint, states = made
    export_specforge(states, tmp_path / "data", str(checkpoint))
    monkeypatch.setenv("SPECFORGE_DEVICE", "cpu")
    monkeypatch.setattr(torch._dynamo.config, "disable", True)  # its losses are compiled, which takes a minute here
    from specforge.algorithms.eagle3 import model
    from specforge.core import loss

    # the loss is a Triton kernel, for which there is no CPU; beside it stands what the kernel is checked with
    monkeypatch.setattr(model.LogSoftmaxLoss, "apply", loss._compute_loss)
    losses = specforge_losses(tmp_path, checkpoint, epochs=4)
    assert losses[-1] < losses[0]


def specforge_losses(folder, checkpoint, epochs):
    """SpecForge's reader, loader, head, model, strategy and optimizer; not its FSDP, which has no CPU."""
    from safetensors.torch import load_file, save_file
    from specforge.algorithms.builtin import builtin_algorithm_registry
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
    from specforge.modeling.target.target_head import TargetHead
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.data_plane import FeatureDataLoader, LocalFeatureStore
    from specforge.training.strategies.base import Eagle3TrainStrategy

    algorithm = builtin_algorithm_registry().resolve("eagle3")
    provider = algorithm.providers.offline_for("text")
    reader = provider.build_reader(str(folder / "data"), run_id="test", ttt_length=2, max_len=256)
    reader.validate_files = True
    refs = reader.read()
    assert len(refs) == 40
    head = folder / "head"
    head.mkdir()
    (head / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    weights = load_file(checkpoint / "model.safetensors")
    save_file({"lm_head.weight": weights["lm_head.weight"]}, head / "model.safetensors")
    (head / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "model.safetensors"}}')
    config = json.loads((checkpoint / "config.json").read_text())
    draft_config = {**config, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    draft_config |= {"draft_vocab_size": config["vocab_size"], "max_position_embeddings": 512}
    (folder / "draft.json").write_text(json.dumps(draft_config))
    torch.manual_seed(0)
    draft = AutoDraftModel.from_config(
        AutoDraftModelConfig.from_file(str(folder / "draft.json")), attention_backend="sdpa", torch_dtype=torch.float32
    )
    vocabulary = {"t2d": torch.ones(config["vocab_size"], dtype=torch.bool)}
    vocabulary["d2t"] = torch.zeros(config["vocab_size"], dtype=torch.int64)
    torch.save(vocabulary, folder / "vocabulary.pt")
    draft.load_vocab_mapping(str(folder / "vocabulary.pt"))
    model = OnlineEagle3Model(draft_model=draft, length=2, attention_backend="sdpa")
    strategy = Eagle3TrainStrategy(model, target_head=TargetHead.from_pretrained(str(head)).float())
    optimizer = BF16Optimizer(draft, lr=2e-3, max_grad_norm=0.5, warmup_ratio=0.0, total_steps=epochs * 40)
    losses = []
    for _ in range(epochs):
        loader = FeatureDataLoader(
            LocalFeatureStore("test"),
            refs=refs,
            batch_size=1,
            collate_fn=provider.build_collator(),
            per_sample_transform=provider.build_normalizer(256),
            strategy=algorithm.name,
        )
        total = 0.0
        for batch in loader:
            loss = strategy.forward_loss(batch).loss
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(refs))
    return losses


@needs("modelopt")
@pytest.mark.parametrize("normed", [False, True], ids=["before the norm", "behind the norm"])
def test_modelopt_converts_a_model_and_trains_it_on_the_export(made, tmp_path, monkeypatch, normed):
    import modelopt.torch.speculative as mtsp
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset
    from modelopt.torch.speculative.plugins import modeling_eagle
    from transformers import AutoModelForCausalLM

    # 0.47 gives an argument that this transformers doesn't take any more
    rotary = modeling_eagle.LlamaRotaryEmbedding
    monkeypatch.setattr(modeling_eagle, "LlamaRotaryEmbedding", lambda config, device: rotary(config).to(device))
    checkpoint, states = made
    export_modelopt(states, tmp_path / "data", str(checkpoint) if normed else None)
    theirs = OfflineSupervisedDataset(sorted((tmp_path / "data").glob("*.pt")), answer_only_loss=True)
    assert len(theirs) == 40
    collate = EagleOfflineDataCollator(train_len=64)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    torch.manual_seed(0)
    architecture = {"num_hidden_layers": 1, "use_aux_hidden_state": True, "use_last_layernorm": True}
    architecture |= {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "draft_vocab_size": model.config.vocab_size}
    architecture |= {"head_dim": model.config.head_dim, "intermediate_size": 96}
    options = {"eagle_offline": True, "eagle_architecture_config": architecture, "eagle_ttt_steps": 2}
    options |= {"eagle_use_torch_compile": False}
    model.config.num_orig_hidden_layers = model.config.num_hidden_layers
    mtsp.convert(model, mode=[("eagle", options)])
    model.train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-3)
    losses = []
    for _ in range(3):
        total = 0.0
        for first in range(0, 40, 8):
            loss = model(**collate([theirs[index] for index in range(first, first + 8)])).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total)
    assert losses[-1] < losses[0]


@needs("datasets")
def test_datasets_loads_the_export(made, tmp_path):
    from datasets import load_from_disk

    _, states = made
    export_datasets(states, tmp_path / "data")
    theirs = load_from_disk(tmp_path / "data").with_format("numpy")
    assert len(theirs) == 40
    for row, ours in zip(theirs, states, strict=True):
        assert row["hidden_states"].tobytes() == ours["hidden_states"].numpy().tobytes()
        assert row["hidden_states"].shape == ours["hidden_states"].shape
        assert row["input_ids"].tolist() == ours["token_ids"].tolist()
        assert row["loss_mask"].tolist() == ours["loss_mask"].tolist()
        assert (row["id"], row["index"], row["prompt_len"]) == (f"c{ours['index']}", ours["index"], ours["prompt_len"])


@needs("sae_lens")
def test_saelens_trains_an_autoencoder_on_the_export(made, tmp_path):
    from sae_lens import StandardTrainingSAE, StandardTrainingSAEConfig
    from sae_lens.config import SAETrainerConfig
    from sae_lens.training.activations_store import ActivationsStore
    from sae_lens.training.sae_trainer import SAETrainer

    _, states = made
    cached = export_saelens(states, tmp_path / "data", context_size=16)
    for slot, hook in enumerate(cached.hook_names):
        store = ActivationsStore(
            model=None,
            dataset=None,
            streaming=False,
            hook_name=hook,
            hook_head_index=None,
            context_size=16,
            d_in=64,
            n_batches_in_buffer=2,
            total_training_tokens=2000,
            store_batch_size_prompts=4,
            train_batch_size_tokens=32,
            prepend_bos=True,
            normalize_activations="none",
            device=torch.device("cpu"),
            dtype="float32",
            cached_activations_path=str(tmp_path / "data"),
        )
        rows, ids = store.get_raw_llm_batch()
        expected = torch.cat([item["hidden_states"][:, slot] for item in states])[: len(rows)]
        assert torch.equal(rows, expected)
        assert ids.tolist() == torch.cat([item["token_ids"] for item in states])[: len(ids)].tolist()
    sae = StandardTrainingSAE(StandardTrainingSAEConfig(d_in=64, d_sae=128, l1_coefficient=0.01))
    before = reconstruction_error(sae, states)
    config = SAETrainerConfig(total_training_samples=16_000, train_batch_size_samples=32, lr=3e-3, lr_end=3e-3)
    SAETrainer(config, sae, store.get_data_loader()).fit()
    assert reconstruction_error(sae, states) < 0.5 * before


def reconstruction_error(sae, states):
    rows = torch.cat([item["hidden_states"][:, -1] for item in states])
    with torch.no_grad():
        return (sae(rows) - rows).pow(2).mean().item()
