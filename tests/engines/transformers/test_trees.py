"""What sequences have in common at their beginning is run once, and every row is what it is alone."""

from contextlib import closing

import pytest
import torch
from extraction_cases import capture_of, engine, random_prompts, recorder_of
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.capture.request import Window
from layertap.capture.spans import joined, within
from layertap.engines.base import ExtractJob
from layertap.engines.transformers.packing import Item, Packer
from layertap.engines.transformers.passes import Passes
from layertap.engines.transformers.trees import LEAST, Tree, overlap
from layertap.testing import oracle, zoo

PIECES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=4)


@given(st.lists(PIECES, min_size=1, max_size=10))
@settings(max_examples=200, deadline=None)
def test_the_rows_of_a_tree_hold_every_token_and_what_neighbours_share_once(samples):
    sequences = sorted([token for kind, count in one for token in [kind] * count + [7]] for one in samples)
    tree = Tree.of(sequences)
    row = [token for one, own in zip(sequences, tree.own, strict=True) for token in one[own.start :]]
    assert len(row) == tree.num_rows
    for one, spans in zip(sequences, tree.rows, strict=True):
        assert [row[place] for span in spans for place in range(*span)] == one
    for before, one, own in zip(sequences, sequences[1:], tree.own[1:], strict=False):
        common = next(
            (i for i, (a, b) in enumerate(zip(before, one, strict=False)) if a != b), min(len(before), len(one))
        )
        common = min(common, len(one) - 1)
        assert own.start == (common if common >= LEAST else 0)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=5), st.integers(0, 25), st.integers(0, 25))
def test_spans_are_cut_and_joined_like_the_rows_that_they_stand_for(pairs, begin, end):
    spans = tuple((start, start + length) for start, length in pairs)
    rows = [row for span in spans for row in range(*span)]
    assert [row for span in within(spans, begin, end) for row in range(*span)] == rows[begin:end]
    assert [row for span in joined(spans) for row in range(*span)] == rows
    assert all(start < stop for start, stop in joined(spans))


def family(seed=0):
    trunk, other, *tails = random_prompts([40, 25, 9, 30, 1, 17, 22], seed=seed)
    branch = trunk + tails[1]
    grown = [
        trunk + tails[0],
        branch,
        branch + tails[2],
        branch + tails[3],
        branch[:33] + tails[4],
        other,
        [*other[:20], 3],
    ]
    return sorted(grown)


def run_shared(made, prompts, layers, windows=None):
    recorder = recorder_of(made)
    captures = [
        capture_of(
            recorder, made.info.hidden_size, prompt, layers, "float32", windows[i] if windows else Window(), f"r{i}"
        )
        for i, prompt in enumerate(prompts)
    ]
    jobs = (
        ExtractJob(index=i, token_ids=prompt, capture=one)
        for i, (prompt, one) in enumerate(zip(prompts, captures, strict=True))
    )
    assert sorted(made.extract(jobs, share_prefixes=True)) == list(range(len(prompts)))
    recorder.close()
    return [one.result.result(0) for one in captures]


def rows_of(result):
    return torch.from_numpy(result.rows).view(torch.float32)


# plain, soft caps with windows, windows, sinks, mixtures of experts, parallel blocks
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "gpt_oss", "qwen3_moe", "cohere", "opt"])
def test_rows_are_those_of_each_sequence_alone(name, tmp_path, monkeypatch):
    run = []
    real = Passes.run
    monkeypatch.setattr(
        Passes, "run", lambda self, way, *rest: (run.append((way, len(rest[0]))), real(self, way, *rest))
    )
    prompts = family()
    with closing(engine(name, tmp_path, max_num_batched_tokens=512)) as made:
        assert made.routes().shared, str(made.routes())
        run.clear()
        results = run_shared(made, prompts, [0, 1, made.info.num_layers])
        assert run == [("shared", len(prompts))]
    model = zoo.build(name)
    for prompt, result in zip(prompts, results, strict=True):
        truth = oracle.hidden_states(model, prompt, [0, 1, model.config.num_hidden_layers])
        torch.testing.assert_close(rows_of(result), truth, atol=1e-4, rtol=1e-4)
        assert result.token_ids.tolist() == prompt


@pytest.mark.parametrize("name", ["mamba2", "jamba"])
def test_models_that_cannot_share_run_each_sequence(name, tmp_path):
    prompts = family()[:4]
    with closing(engine(name, tmp_path)) as made:
        assert not made.routes().shared
        results = run_shared(made, prompts, [2])
    model = zoo.build(name)
    for prompt, result in zip(prompts, results, strict=True):
        torch.testing.assert_close(rows_of(result), oracle.hidden_states(model, prompt, [2]), atol=1e-4, rtol=1e-4)


def test_windows_of_positions_come_from_trunk_and_branch(tmp_path):
    prompts = family()
    windows = [Window(positions=(begin, begin + 20)) for begin in range(len(prompts))]
    with closing(engine("llama", tmp_path, max_num_batched_tokens=512)) as made:
        results = run_shared(made, prompts, [1, 3], windows)
    model = zoo.build("llama")
    for prompt, result, begin in zip(prompts, results, range(len(prompts)), strict=True):
        truth = oracle.hidden_states(model, prompt, [1, 3])[begin : begin + 20]
        torch.testing.assert_close(rows_of(result), truth, atol=1e-4, rtol=1e-4)


def test_a_batch_is_filled_by_what_is_run_and_bounded_by_what_is_seen():
    packer = Packer("shared", 100, overlap=overlap)
    trunk = list(range(60))
    for n in range(60):
        tokens = [*trunk, 100 + n, 200 + n]
        packer.push(Item(tokens, len(tokens)))
    first = packer.pop()
    assert first.way == "shared"
    # 62 + 2 each fit 20 of them into 100; 8 * 100 keys allow 12
    assert len(first.items) == 12
    assert Tree.of([item.value for item in first.items]).num_rows == 62 + 11 * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused kernels of half precision need CUDA")
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_fused_kernels_see_the_trunk_behind_a_branch(name, tmp_path):
    prompts = family()
    with closing(engine(name, tmp_path, dtype="bfloat16", device="cuda", max_num_batched_tokens=512)) as made:
        assert made.routes().shared, str(made.routes())
        results = run_shared(made, prompts, [1, made.info.num_layers])
    model = zoo.build(name)
    for prompt, result in zip(prompts, results, strict=True):
        truth = oracle.hidden_states(model, prompt, [1, model.config.num_hidden_layers])
        errors = (rows_of(result) - truth).norm(dim=-1) / truth.norm(dim=-1)
        assert float(errors.max()) < 3e-2
