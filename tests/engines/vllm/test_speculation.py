"""Speculative decoding: rows of rejected drafts never reach a file."""

import random

import checkpoints
import pytest
import running
from running import check_file, params


@pytest.fixture(scope="module")
def checkpoint(checkpoint_folder):
    return checkpoints.save("llama", checkpoint_folder)


@pytest.fixture(scope="module")
def llm(checkpoint, tmp_path_factory):
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with running.running(
        checkpoint,
        tmp_path_factory.mktemp("states"),
        speculative_config=speculation,
        block_size=32,
        num_gpu_blocks_override=12,
        disable_log_stats=False,
    ) as engine:
        yield engine


def test_rejected_drafts_never_reach_a_file(llm, checkpoint):
    model = running.load_oracle("llama", checkpoint)
    rng = random.Random(3)
    asked = []
    for _ in range(16):
        word = [rng.randrange(8, 264) for _ in range(5)]
        asked.append({"prompt_token_ids": (word * 12)[: rng.randrange(20, 60)]})
    outputs = llm.generate(asked, params(40, include_output_tokens=True), use_tqdm=False)
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        check_file(model, output.kv_transfer_params["hidden_states_path"], tokens[:-1])
    counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    drafted = counted["vllm:spec_decode_num_draft_tokens"]
    assert 0 < counted["vllm:spec_decode_num_accepted_tokens"] < drafted
