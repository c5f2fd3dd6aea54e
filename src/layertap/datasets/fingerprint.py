"""What a model, its tokenizer and its template are, in short hashes for the manifest."""

import json
import os
from pathlib import Path
from typing import Any

import xxhash

_ENDS_BYTES = 1 << 20
_NUM_SAMPLES, _SAMPLE_BYTES = 512, 4096
_MODEL_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


def model_fingerprint(model: str, revision: str | None) -> str | None:
    """Hash the configuration and, of each weight file, name, size, first and last MiB, and 512 places between.

    Reading all bytes of a big model would take minutes. Its ends alone are embeddings and a norm, which fine-tuning may leave as
    they are; between them some place of every large matrix is looked at.

    Returns:
        None where the files aren't on this machine under a name that we know.
    """
    path = Path(model)
    if path.is_file():
        files = [path]
    else:
        folder = path if path.is_dir() else _cached_folder(model, revision)
        if folder is None:
            return None
        files = sorted(
            file for file in folder.iterdir() if file.suffix in _MODEL_SUFFIXES or file.name == "config.json"
        )
    if not files:
        return None
    state = xxhash.xxh3_128()
    for file in files:
        size = file.stat().st_size
        # a GGUF file that was renamed is still the same model
        state.update(f"{file.name if len(files) > 1 else ''}:{size};".encode())
        with file.open("rb") as opened:
            state.update(opened.read(_ENDS_BYTES))
            for number in range(_NUM_SAMPLES if size > 2 * _ENDS_BYTES else 0):
                place = _ENDS_BYTES + number * (size - 2 * _ENDS_BYTES) // _NUM_SAMPLES
                state.update(os.pread(opened.fileno(), _SAMPLE_BYTES, place))
            opened.seek(max(0, size - _ENDS_BYTES))
            state.update(opened.read(_ENDS_BYTES))
    return str(state.hexdigest())


def tokenizer_hash(tokenizer: Any) -> str | None:
    """Hash a tokenizer of transformers: vocabulary, rules and special tokens."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        # set by whoever tokenized last
        rules.pop("truncation", None)
        rules.pop("padding", None)
    else:
        rules = tokenizer.get_vocab()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _hash([rules, special])


def template_hash(tokenizer: Any) -> str | None:
    """Hash a tokenizer's chat template."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else _hash(template)


def _cached_folder(model: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _hash(content: object) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()))
