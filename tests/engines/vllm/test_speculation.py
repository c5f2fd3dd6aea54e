"""Real speculative decoding beside capture: rows of rejected drafts never reach a file, and the slot is vLLM's."""

import random

import checkpoints
import drafts
import pytest
import running
from running import check_file, params

METHODS = ("draft_model", "eagle", "eagle3", "ngram")


@pytest.fixture(scope="module")
def checkpoint(checkpoint_folder):
    return checkpoints.save("llama", checkpoint_folder)


@pytest.fixture(scope="module", params=METHODS)
def speculating(request, checkpoint, tmp_path_factory):
    """The method, and an engine that speculates by it under a KV cache that is too small for its load."""
    folder = tmp_path_factory.mktemp("draft")
    settings = {
        "ngram": lambda: {"prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "draft_model": lambda: {"model": str(drafts.save_near_copy(checkpoint, folder, noise=0.02))},
        "eagle": lambda: {"model": str(drafts.save_eagle(checkpoint, folder, version=1))},
        "eagle3": lambda: {"model": str(drafts.save_eagle(checkpoint, folder, version=3))},
    }[request.param]()
    with running.running(
        checkpoint,
        tmp_path_factory.mktemp("states"),
        speculative_config={"method": request.param, "num_speculative_tokens": 4, **settings},
        block_size=32,
        num_gpu_blocks_override=12 if request.param == "ngram" else 24,
        disable_log_stats=False,
    ) as engine:
        yield request.param, engine


def test_rejected_drafts_never_reach_a_file(speculating, checkpoint):
    method, llm = speculating
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
    drafted, accepted = (counted[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert accepted < drafted
    if method in ("ngram", "draft_model"):  # the random heads are hardly ever right
        assert accepted > 0
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    assert runner.use_aux_hidden_state_outputs == (method == "eagle3")
