"""Hidden states from a running server, as vLLM documents it: the official client asks, the file is read by its path.

The server is vLLM's documented command with `layertap` in the place of `vllm`:

    layertap serve Qwen/Qwen3-8B \
        --speculative_config '{"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config":
            {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}}}' \
        --kv_transfer_config '{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": "/dev/shm/hidden_states"}}'

Run as: python examples/extract_hidden_states_online.py [URL] [MODEL]
"""

import sys

from openai import OpenAI

from layertap import example_hidden_states_connector

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "Qwen/Qwen3-8B"

client = OpenAI(base_url=URL, api_key="EMPTY")


def show(kv_transfer_params: dict[str, str]) -> None:
    path = kv_transfer_params["hidden_states_path"]
    states = example_hidden_states_connector.load_hidden_states(path)
    print("token_ids:", list(states["token_ids"].shape))
    print("hidden_states:", list(states["hidden_states"].shape))
    example_hidden_states_connector.cleanup_hidden_states(path)


completion = client.completions.create(model=MODEL, prompt="The future of AI is", max_tokens=1)
show(completion.kv_transfer_params)

chat = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": "Say hello."}],
    max_tokens=8,
    extra_body={"kv_transfer_params": {"include_output_tokens": True}},
)
show(chat.kv_transfer_params)

# a stream has the handle on its last chunk
for chunk in client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, stream=True):
    if chunk.choices[0].finish_reason is not None:
        show(chunk.kv_transfer_params)
