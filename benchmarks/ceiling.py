"""What no extraction can be faster than: the matrix products of a model's blocks alone."""

import time

import torch


def gemm_rate(shape: dict, num_tokens: int, rows: int, num_blocks: int, device: str = "cuda") -> float:
    """Tokens per second of the matrix products of `num_blocks` blocks, back to back, timed as long as the work.

    Args:
        shape: the configuration of a Qwen3.
        num_tokens: of the work.
        rows: of one product.
        num_blocks: that are run.
        device: "cuda", or "cpu" to try it.
    """
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv = shape["num_attention_heads"] * shape["head_dim"], shape["num_key_value_heads"] * shape["head_dim"]
    # (out, in) of q, k, v, o, gate, up, down
    products = [
        (heads, hidden),
        (kv, hidden),
        (kv, hidden),
        (hidden, heads),
        (inner, hidden),
        (inner, hidden),
        (hidden, inner),
    ]
    options = {"dtype": torch.bfloat16 if device == "cuda" else torch.float32, "device": device}
    inputs = {width: torch.randn(rows, width, **options) for width in (hidden, heads, inner)}
    weights = [[torch.randn(*size, **options) * 0.02 for size in products] for _ in range(3)]
    passes = max(1, round(num_tokens / rows))

    def step(block: int) -> None:
        for weight in weights[block % len(weights)]:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for block in range(6):
        step(block)
    wait()
    began = time.perf_counter()
    for _ in range(passes):
        for block in range(num_blocks):
            step(block)
    wait()
    return passes * rows / (time.perf_counter() - began)
