"""The embedded engine: any causal language model of transformers, on the CPU or one GPU, in the caller's process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from layertap.engines.base import ExtractJob, GenerateJob, ModelInfo
from layertap.engines.transformers.budget import Plan, device_room, parse_memory
from layertap.engines.transformers.extract import Extractor
from layertap.engines.transformers.generate import GenerationOptions, Generator
from layertap.engines.transformers.generation_config import read_generation_config
from layertap.engines.transformers.load import open_model, open_tokenizer
from layertap.engines.transformers.reload import reload_weights
from layertap.engines.transformers.running import check_params
from layertap.engines.transformers.selftest import Routes
from layertap.engines.transformers.spot_check import SpotCheck
from layertap.engines.transformers.trial import Verdict
from layertap.engines.transformers.weights import Weights
from layertap.errors import EngineError, ModelError, OptionError
from layertap.params import SamplingParams

__all__ = ["TransformersEngine"]

logger = logging.getLogger(__name__)


class TransformersEngine:
    """Runs a model for extraction and generation; both share its weights. Thread-safe.

    Args:
        model: a folder, a hub id or a GGUF file.
        dtype: "auto" (for the machine), "float32", "bfloat16" or "float16".
        device: "cpu", "cuda", "cuda:1", ...; None takes a GPU if there is one.
        revision: of the hub.
        trust_remote_code: whether code of the checkpoint may run.
        tokenizer: a folder or hub id, where the tokenizer isn't the model's.
        max_model_len: a lower limit on the length of sequences.
        max_num_batched_tokens: most tokens of a shared forward of `extract`; None chooses for the device.
        max_memory: device memory that `extract` may take, such as "24GiB"; default what is free. Blocks that don't fit in it
            stay in host memory and are copied while others run.
        load_format: "auto", or "dummy" for random weights without a checkpoint, for measurements.
        generation: how much memory and how many sequences generation may take.
        spot_check: one prompt of `extract` in so many, and one generated sequence with rows in so many, is computed a second
            time, alone, and compared; 0 is never.

    Raises:
        ModelError: the model can't be loaded.
        OptionError: a device or dtype that can't be had.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        tokenizer: str | Path | None = None,
        max_model_len: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_memory: int | str | None = None,
        load_format: str = "auto",
        generation: GenerationOptions | None = None,
        spot_check: int = 1000,
    ) -> None:
        self._source = open_model(
            model, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code
        )
        self._tokenizer_source = tokenizer
        for name, value in (("max_model_len", max_model_len), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"{name}: expected a whole number of at least 1, got {value!r}")
        if load_format not in ("auto", "dummy"):
            raise OptionError(f"load_format: expected 'auto' or 'dummy', got {load_format!r}")
        if load_format == "dummy":
            logger.warning("load_format='dummy': the weights are random, and so are the rows")
        room = device_room(self._source.device, parse_memory(max_memory))
        self.weights = Weights(self._source, room=room, dummy=load_format == "dummy")
        layout = self.weights.layout
        self._generation_options = generation
        self._generator: Generator | None = None
        self._closed = False
        self._lock = threading.Lock()
        eos_token_ids, defaults = read_generation_config(self._source)
        self.info = ModelInfo(
            model=self._source.name,
            revision=self._source.revision,
            num_layers=self.weights.num_layers,
            hidden_size=layout.hidden_size,
            vocab_size=layout.vocab_size,
            max_model_len=min(self._source.max_model_len, max_model_len or self._source.max_model_len),
            dtype=str(self._source.dtype).removeprefix("torch."),
            device=str(self._source.device),
            engine="transformers",
            engine_version=transformers.__version__,
            quantization="dummy" if load_format == "dummy" else self._source.quantization,
            residual=layout.found.residual.note,
            eos_token_ids=eos_token_ids,
            generation_defaults=defaults,
        )
        self._extractor = Extractor(
            self.weights, max_model_len=self.info.max_model_len, budget_tokens=max_num_batched_tokens
        )

        self._extractor.spot_check.one_in = spot_check
        self.spot_checks = {"extract": self._extractor.spot_check, "generate": SpotCheck(one_in=spot_check)}
        """By kind of work: which sequences were computed twice, and what came of it."""

    @property
    def model_type(self) -> str:
        """As its configuration calls it."""
        return str(self._source.config.model_type)

    @property
    def spot_check(self) -> SpotCheck:
        """That of `extract`."""
        return self._extractor.spot_check

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None where the model comes without one: prompts are token ids then."""
        try:
            return open_tokenizer(self._source, self._tokenizer_source)
        except ModelError as exc:
            if self._tokenizer_source is not None:
                raise
            logger.warning("prompts can only be token ids: %s", exc)
            return None

    def extract(self, jobs: Iterable[ExtractJob], *, share_prefixes: bool = False) -> Iterator[int]:
        """Run prompts as `jobs` are pulled; yields the index of each job whose rows have all been handed over (or failed)."""
        return self._extractor.run(jobs, share_prefixes=share_prefixes)

    def routes(self, depth: int | None = None) -> Routes:
        """Say how prompts of this model may share a forward, with its first `depth` blocks (all of them if None)."""
        return self._extractor.prepare(self.info.num_layers if depth is None else depth)

    @property
    def plan(self) -> Plan | None:
        """How weights and tokens share the device's memory, where not all weights fit in it and some are loaded."""
        return self._extractor.plan

    def check(self, params: SamplingParams) -> None:
        """Refuse what this engine can't honour.

        Raises:
            OptionError: an option; it is named.
        """
        check_params(params, self.info, self.tokenizer)

    def submit(self, job: GenerateJob) -> None:
        """Queue a generation; the first one loads what isn't loaded yet. Failures come as a Delta with finish_reason "error".

        Raises:
            ModelError: the weights can't be loaded.
            OptionError: the request id is in use.
            EngineError: the engine is closed.
        """
        self.generator.submit(job)

    def abort(self, request_id: str) -> None:
        """End a generation now; its last Delta says "abort". Unknown ids are ignored."""
        if self._generator is not None:
            self._generator.abort(request_id)

    @property
    def generator(self) -> Generator:
        """The generating half, made when it is first needed: it wants the whole model, the head too."""
        with self._lock:
            if self._closed:
                raise EngineError("the engine is closed")
            if self._generator is None:
                model = self.weights.at_least(self.info.num_layers, complete=True)
                self._generator = Generator(
                    model, self.tokenizer, self.info, self._generation_options, self.spot_checks["generate"]
                )
            return self._generator

    def verdict(self) -> Verdict:
        """Say how this model generates (batched or one at a time), and why."""
        return self.generator.verdict

    def reload(self, folder: Path) -> int:
        """Exchange the weights for those of a checkpoint of the same model; nothing may run meanwhile.

        Raises:
            ModelError: it can't be loaded, or isn't of the same model; nothing was changed.
        """
        return self._extractor.between_forwards(lambda: reload_weights(self.weights, folder))

    def close(self) -> None:
        """End everything; running generations end with an error."""
        with self._lock:
            self._closed = True
            generator, self._generator = self._generator, None
        if generator is not None:
            generator.close()
