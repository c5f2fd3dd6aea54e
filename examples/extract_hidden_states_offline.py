"""vLLM's documented offline example; only the imports are changed.

Run as: python examples/extract_hidden_states_offline.py [MODEL]
"""

import sys
import tempfile

from layertap import LLM, KVTransferConfig, SamplingParams, example_hidden_states_connector

MODEL = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-8B"

with tempfile.TemporaryDirectory() as tmpdirname:
    llm = LLM(
        model=MODEL,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {
                    "eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4],
                }
            },
        },
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleHiddenStatesConnector",
            kv_role="kv_producer",
            kv_connector_extra_config={
                "shared_storage_path": tmpdirname,
            },
        ),
    )

    prompts = ["Generate a sentence with hidden states", "Write a python function"]
    sampling_params = SamplingParams(max_tokens=1)
    outputs = llm.generate(prompts, sampling_params)

    for output in outputs:
        print("\nPrompt:", output.prompt)
        print("Prompt token ids:", output.prompt_token_ids)

        hidden_states_path = output.kv_transfer_params.get("hidden_states_path")
        assert hidden_states_path is not None
        print("Prompt hidden states path:", hidden_states_path)

        data = example_hidden_states_connector.load_hidden_states(hidden_states_path)
        token_ids = data["token_ids"]
        hidden_states = data["hidden_states"]

        print("Extracted token ids:", token_ids)  # Matches prompt token ids
        print("Extracted hidden states shape:", hidden_states.shape)  # [num prompt tokens, num layers, hidden size]
        print("Extracted hidden states:", hidden_states)

        example_hidden_states_connector.cleanup_hidden_states(hidden_states_path)
