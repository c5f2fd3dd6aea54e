"""Tiny random models of every decoder architecture that transformers can build small.

    zoo.CASES                     # names; importing this module costs neither torch nor transformers
    model = zoo.build("gemma2")   # float32, eval mode, the same weights for the same seed
    folder = zoo.save("gemma2", tmp_path)   # what `from_pretrained` loads, with a tokenizer and a chat template

Sizes come from `shrink`, weights from `weights`; what can't be built is in `zoo.UNBUILDABLE` with the reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layertap.testing.cases import AWKWARD, CASES, NEWER, SAME_AS, UNBUILDABLE, Case

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = [
    "AWKWARD",
    "CASES",
    "NEWER",
    "SAME_AS",
    "TOKEN_IDS",
    "UNBUILDABLE",
    "Case",
    "build",
    "build_meta",
    "case",
    "config",
    "decoder_inputs",
    "facts",
    "model_class",
    "save",
]

TOKEN_IDS = range(8, 264)
"""Ids of ordinary tokens (the tokenizer's bytes): no model of the zoo gives any of them a meaning of its own."""


def case(name: str) -> Case:
    """Look a case up; an unknown name is an error that lists the near ones.

    Example:
        >>> case("falcon-alibi").model_type
        'falcon'
    """
    if name in CASES:
        return CASES[name]
    if name in UNBUILDABLE:
        raise KeyError(f"the zoo has no {name!r}: {UNBUILDABLE[name]}")
    if name in NEWER:
        raise KeyError(f"the zoo has no {name!r} with this transformers: it came with {NEWER[name]}")
    near = [other for other in CASES if other.startswith(name[:4])]
    raise KeyError(f"the zoo has no {name!r}; near: {', '.join(near) or 'none'}; see zoo.CASES and zoo.SAME_AS")


def model_class(name: str) -> type[PreTrainedModel]:
    """Return the transformers class of a case."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = case(name)
    loaded: type[PreTrainedModel] = getattr(
        transformers, found.model_class or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[found.model_type]
    )
    return loaded


def config(name: str) -> PreTrainedConfig:
    """Return the tiny configuration of a case."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from layertap.testing.shrink import shrink

    cls = model_class(name)
    by_type = CONFIG_MAPPING[case(name).model_type]
    wanted = cls.config_class
    return shrink(by_type if wanted is None or issubclass(by_type, wanted) else wanted, case(name).overrides)


def build(name: str, seed: int = 0, attn_implementation: str = "eager") -> PreTrainedModel:
    """Build one model of the zoo: float32, eval mode, on the CPU.

    Example:
        >>> build("llama").config.num_hidden_layers
        4
    """
    import torch

    from layertap.testing.weights import randomise

    tiny = config(name)
    tiny._attn_implementation = attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(name)(tiny).float().eval()
    randomise(model, seed)
    model.tie_weights()
    return model


def build_meta(name: str) -> PreTrainedModel:
    """Build the structure of one model without any weights, on the meta device."""
    import torch

    with torch.device("meta"):
        return model_class(name)(config(name)).eval()


def decoder_inputs(model: PreTrainedModel, token_ids: Any) -> dict[str, Any]:
    """Return the keyword arguments with which a forward reads `token_ids` [1, tokens] through the text decoder.

    An encoder-decoder model reads them on the decoder's side; its encoder gets a fixed short input, so that what the decoder sees
    beside the tokens is always the same.
    """
    import torch

    if not model.config.is_encoder_decoder or "decoder_input_ids" not in _parameters(model):
        return {"input_ids": token_ids}
    if "input_features" in _parameters(model):
        frames = 2 * int(model.config.max_source_positions)
        features = torch.linspace(-1.0, 1.0, int(model.config.num_mel_bins) * frames)
        return {"input_features": features.reshape(1, -1, frames), "decoder_input_ids": token_ids}
    return {"input_ids": torch.arange(TOKEN_IDS.start, TOKEN_IDS.start + 6)[None], "decoder_input_ids": token_ids}


def _parameters(model: PreTrainedModel) -> set[str]:
    import inspect

    return set(inspect.signature(model.forward).parameters)


def save(name: str, folder: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint of a case into `folder`/`name` with a tokenizer, and return that path; one that is there is kept.

    Example:
        >>> save("llama", "checkpoints")  # doctest: +SKIP
    """
    target = Path(folder) / name
    if not target.exists():
        from layertap.testing.tokenizer import byte_tokenizer

        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as fresh:
            byte_tokenizer().save_pretrained(fresh)
            build(name, seed).save_pretrained(fresh)
            Path(fresh).rename(target)
            Path(fresh).mkdir()
        target.chmod(0o755)
    return target


def facts(names: Iterable[str] | None = None, *, run: bool = False) -> dict[str, dict[str, Any]]:
    """Return what was found in each case, ready for a table or JSON.

    By structure only, on the meta device; with `run`, models are built and one forward each is watched too.

    Example:
        >>> facts(["gpt2"])["gpt2"]["container_path"]
        'transformer.h'
    """
    from layertap.errors import UnsupportedModelError

    table: dict[str, dict[str, Any]] = {}
    for name in CASES if names is None else names:
        row: dict[str, Any] = {"class": model_class(name).__name__, "kind": case(name).kind, "num_layers": None}
        row |= {"container_path": None, "block_classes": [], "stream": None, "notes": [], "refused": None}
        try:
            row |= _found(name, run)
        except UnsupportedModelError as error:
            row["refused"] = str(error)
        table[name] = row
    return table


def _found(name: str, run: bool) -> dict[str, Any]:
    import torch

    from layertap.capture.blocks import find_blocks
    from layertap.capture.probe import probe

    model = build(name) if run else build_meta(name)
    found = find_blocks(model)
    ids = torch.arange(TOKEN_IDS.start, TOKEN_IDS.start + 12)[None]
    return {
        "num_layers": found.num_layers,
        "container_path": found.container_path,
        "block_classes": list(dict.fromkeys(type(block).__name__ for block in found.blocks)),
        "stream": found.residual.kind,
        "notes": probe(found, lambda: model(**decoder_inputs(model, ids), use_cache=False), 12) if run else [],
    }
