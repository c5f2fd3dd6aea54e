"""A model of no importance, for tests that need only its limits."""

from layertap.engines.base import ModelInfo

INFO = ModelInfo(
    model="m",
    revision=None,
    num_layers=2,
    hidden_size=8,
    vocab_size=1000,
    max_model_len=1000,
    dtype="float32",
    device="cpu",
    engine="transformers",
    engine_version="5",
    quantization=None,
    residual="",
)
