"""Features of stock vLLM beside capture, in one engine: adapters, structured output, beam search."""

import json
import re
from pathlib import Path

import checkpoints
import drafts
import pytest
import running
from running import check_file, params, prompts

from layertap.files.read import read_header


@pytest.fixture(scope="module")
def checkpoint(checkpoint_folder):
    return checkpoints.save("llama", checkpoint_folder)


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def adapters(checkpoint, tmp_path_factory):
    """Folders of two adapters."""
    model, folder = running.load_oracle("llama", checkpoint), tmp_path_factory.mktemp("adapters")
    return [drafts.save_adapter(model, folder / str(seed), seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def llm(checkpoint, storage):
    # In a batch with adapters vLLM's CPU build runs requests without one through the last slot: that one stays empty.
    with running.running(
        checkpoint,
        storage,
        enable_lora=True,
        max_loras=3,
        max_lora_rank=drafts.RANK,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    ) as engine:
        yield engine


def generate(llm, inputs, sampling, **options):
    return llm.generate(inputs, sampling, use_tqdm=False, **options)


def tokens_of(output, choice=0):
    return [*output.prompt_token_ids, *output.outputs[choice].token_ids]


def path_of(output):
    return output.kv_transfer_params["hidden_states_path"]


def test_adapters_and_the_base_model_in_one_batch_give_each_their_rows(llm, checkpoint, adapters):
    from vllm.lora.request import LoRARequest

    base = running.load_oracle("llama", checkpoint)
    merged = [drafts.merge(running.load_oracle("llama", checkpoint), adapter) for adapter in adapters]
    lora = [None, *(LoRARequest(f"adapter-{i}", i, str(path)) for i, path in enumerate(adapters, start=1))]
    outputs = generate(
        llm,
        prompts([20, 90, 33, 47, 100, 12], seed=3),
        params(6, include_output_tokens=True),
        lora_request=lora * 2,
    )
    for output, model, asked in zip(outputs, [base, *merged] * 2, lora * 2, strict=True):
        check_file(model, path_of(output), tokens_of(output)[:-1])
        said = read_header(Path(path_of(output))).info.facts.get("lora")
        assert said == (None if asked is None else asked.lora_name)
    (prompt,) = prompts([30], seed=4)
    same = generate(llm, [prompt] * 3, params(1), lora_request=lora)  # shared prompts, but not shared rows
    for output, model in zip(same, [base, *merged], strict=True):
        check_file(model, path_of(output), prompt["prompt_token_ids"])


@pytest.mark.parametrize(
    ("kind", "value", "matches"),
    [
        ("choice", ["yes", "no maybe"], lambda text: text in ("yes", "no maybe")),
        ("regex", "[a-c]{3}-[0-9]{4}", lambda text: re.fullmatch("[a-c]{3}-[0-9]{4}", text)),
        (
            "json",
            {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False},
            lambda text: json.loads(text)["a"] in (1, 2),
        ),
    ],
)
def test_structured_output_keeps_its_rows(llm, checkpoint, kind, value, matches):
    from vllm.sampling_params import StructuredOutputsParams

    sampling = params(40, include_output_tokens=True)
    sampling.ignore_eos = False
    sampling.structured_outputs = StructuredOutputsParams(**{kind: value})
    free = params(10, include_output_tokens=True)
    outputs = generate(llm, prompts([20, 90, 33, 15], seed=5), [sampling, free, sampling, sampling])
    model = running.load_oracle("llama", checkpoint)
    for output in outputs:
        check_file(model, path_of(output), tokens_of(output)[:-1])
    tokenizer = llm.get_tokenizer()
    for output in (outputs[0], *outputs[2:]):
        text = tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
        assert output.outputs[0].finish_reason == "stop"
        assert matches(text), text


def test_steps_of_beam_search_leave_no_files_and_its_sequences_can_be_captured(llm, checkpoint, storage, caplog):
    from vllm.sampling_params import BeamSearchParams

    before = set(storage.iterdir())
    found = llm.beam_search(prompts([20, 70], seed=6), BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
    assert set(storage.iterdir()) == before
    assert sum("beam search" in record.getMessage() for record in caplog.records) == 1
    sequences = [sequence.tokens for output in found for sequence in output.sequences]
    assert len(sequences) == 6
    outputs = generate(llm, [{"prompt_token_ids": tokens} for tokens in sequences], params(1))
    model = running.load_oracle("llama", checkpoint)
    for output, tokens in zip(outputs, sequences, strict=True):
        check_file(model, path_of(output), tokens)


def test_one_token_with_logprobs_is_no_beam_search(llm, checkpoint):
    sampling = params(1, logprobs=4)
    sampling.detokenize = False
    (output,) = generate(llm, prompts([20], seed=7), sampling)
    check_file(running.load_oracle("llama", checkpoint), path_of(output), output.prompt_token_ids)
