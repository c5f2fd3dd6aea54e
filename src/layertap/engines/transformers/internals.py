"""Everything that generation touches inside transformers beyond its documented API, in one place.

transformers supplies the paged cache, the scheduler and the packed forward (continuous batching), and the preparation of
inputs for one sequence with the model's own cache. Its manager's thread isn't used: the loop is ours (generate.py), it calls
the batch processor's three steps itself. So there is no second thread to die, and between two steps nothing moves.

What is touched is checked when it is first used (`check_shape`), and a change of its shape is an error that names the
attribute, never a wrong row. Written for 5.17 to 5.24: 5.17 calls the page size `block_size` and switches attention to
`paged|sdpa`; from 5.24 on the model's own attention stores keys and values in the paged cache, before that the attention
function did.
"""

import dataclasses
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.utils import GenerationMode

from layertap.engines.transformers.paged import PAGED, register_paged
from layertap.errors import EngineError

__all__ = ["OneSequence", "PagedRunner", "Scheduled", "set_attention"]

_FULL = "FullAttentionCacheAllocator"
"""What keeps blocks of all tokens; others keep windows."""
_FORGOTTEN_LATE = 64
"""Sequences that have ended, whose places in the cache may still be known."""


def set_attention(model: Any, implementation: str) -> None:
    """Choose the attention of a view; a model that has only one of its own keeps it."""
    if implementation == PAGED:
        register_paged()
    if getattr(model.config, "_attn_implementation", None) != implementation:
        model.set_attn_implementation(implementation)


@dataclasses.dataclass(slots=True)  # not frozen: a step makes hundreds
class Scheduled:
    """One request's part of the packed row that runs next.

    Attributes:
        key: the request.
        offset: its first row in the packed row.
        count: how many rows.
        start: absolute position of the first.
        samples: whether its last row's logits are the next token's.
    """

    key: str
    offset: int
    count: int
    start: int
    samples: bool


class PagedRunner:
    """transformers' continuous batching, step by step, with a sampler from outside."""

    def __init__(
        self,
        model: nn.Module,
        *,
        num_pages: int,
        page_size: int,
        max_batch_tokens: int,
        max_requests: int,
    ) -> None:
        self._model = model
        self._choose: Callable[[Tensor], list[int]] | None = None
        attention = getattr(model.config, "_attn_implementation", None)
        if attention == PAGED:
            set_attention(model, "sdpa")  # the manager knows its own kinds only
        self._manager = _make_manager(model, num_pages, page_size, max_batch_tokens, max_requests)
        if attention == PAGED:
            set_attention(model, PAGED)
        processor = self._manager._create_batch_processor()
        self._manager.batch_processor = processor
        self._processor = processor
        _check_shape(self._manager, processor)
        processor.model_runner._sample = self._sample
        if _lists_places(processor):
            _Places(processor)
        if "cache" in inspect.signature(model.forward).parameters:
            _answer_as_a_cache(processor)
        self._stream = getattr(processor.inputs_and_outputs, "compute_stream", None)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self.capacity = _capacity(processor, page_size)
        """Tokens that one request can have at most."""

    def add(self, key: str, token_ids: list[int]) -> None:
        """Queue a request; it ends only when it is removed."""
        self._manager.add_request(token_ids, request_id=key, max_new_tokens=2**31 - 1, eos_token_id=-1)

    def remove(self, key: str) -> None:
        """Free a request; takes effect before the next step."""
        self._manager.cancel_request(key)
        # Set when the cache ran full, and unset only by requests that end by transformers' own rules.
        self._processor.scheduler.block_new_requests = False

    def _on_stream(self) -> AbstractContextManager[Any]:
        """transformers runs the model on a stream of its own, and makes its inputs on the current one without waiting for them:
        behind an extraction's kernels there, they would come too late. Here everything is on the one stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def schedule(self) -> list[Scheduled]:
        """Choose what runs next; empty if there is nothing, or nothing fits."""
        with self._on_stream():
            if not self._processor.prepare_next_batch():
                return []
        scheduled = []
        offset = 0
        for future in self._processor.inputs_and_outputs.requests_in_batch:
            state, count = future.state, future.query_length
            scheduled.append(
                Scheduled(state.request_id, offset, count, state.position_offset - count, future.has_new_token)
            )
            offset += count
        return scheduled

    def forward(self, choose: Callable[[Tensor], list[int]]) -> None:
        """Run the scheduled rows; `choose` gets the logits and gives the tokens."""
        self._choose = choose
        with self._on_stream():
            try:
                self._processor._generation_step(self._model)
            finally:
                self._choose = None
            self._processor.update_batch()

    def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
        num_sampled = sum(f.has_new_token for f in self._processor.inputs_and_outputs.requests_in_batch)
        if num_sampled and self._choose is not None:  # rows past these are padding
            tokens = self._choose(scores[0, :num_sampled])
            output_ids[0, :num_sampled].copy_(torch.tensor(tokens, dtype=output_ids.dtype))

    def close(self) -> None:
        """Give the cache back."""
        self._manager.batch_processor = None
        self._processor.inputs_and_outputs = None
        self._processor.cache = None


class _Places:
    """Where in the cache the tokens of a step's sequences are, as arrays.

    transformers lists the place of every cached token of every sequence in every step, number by number. Here an array of the
    places of a sequence's blocks is kept, and made anew when it gets another block.
    """

    def __init__(self, processor: Any) -> None:
        self._ios = processor.inputs_and_outputs
        self._allocators = list(processor.cache.cache_allocators.values())
        self._known: dict[tuple[int, str], tuple[list[int], NDArray[np.int64]]] = {}
        self._writes: list[list[NDArray[np.int64]]] = []
        self._reads: list[list[NDArray[np.int64]]] = []
        self._prepare = self._ios.prepare_batch_tensors
        self._ios.prepare_batch_tensors = self._prepare_batch
        processor.cache.extend_read_and_write_indices = self._extend

    def _extend(self, request_id: str, past_length: int, query_length: int, read_index: Any, write_index: Any) -> None:
        end = past_length + query_length
        for number, allocator in enumerate(self._allocators):
            if type(allocator).__name__ == _FULL:
                places = self._of_blocks(number, allocator, request_id)
                if len(places) < end:
                    raise EngineError(f"the cache has {len(places)} places for the {end} tokens of a sequence")
                writes, reads = places[past_length:end], places[:end]
            else:
                writes = np.array(allocator.get_write_indices(request_id, past_length, query_length), np.int64)
                reads = writes[:0]
                if read_index is not None:
                    reads = np.array(allocator.get_read_indices(request_id, past_length, query_length), np.int64)
            self._writes[number].append(writes)
            if read_index is not None:
                self._reads[number].append(reads)

    def _of_blocks(self, number: int, allocator: Any, request_id: str) -> NDArray[np.int64]:
        blocks = allocator.block_table[request_id]
        known = self._known.get((number, request_id))
        if known is not None and known[0] == blocks:
            return known[1]
        starts = np.array(blocks, np.int64) * allocator.block_physical_stride
        places: NDArray[np.int64] = (starts[:, None] + np.arange(allocator.tokens_per_page)).reshape(-1)
        self._known[number, request_id] = list(blocks), places
        return places

    def _prepare_batch(self, *args: Any, **kwargs: Any) -> None:
        self._writes = [[] for _ in self._allocators]
        self._reads = [[] for _ in self._allocators]
        self._prepare(*args, **kwargs)
        for storage, sizes, found in (
            (self._ios.write_index_storage, self._ios.true_write_sizes, self._writes),
            (self._ios.read_index_storage, self._ios.true_read_sizes, self._reads),
        ):
            for number, parts in enumerate(found):
                if parts:
                    places = torch.from_numpy(np.concatenate(parts))
                    storage[number, : len(places)] = places
                    sizes[number] = len(places)
        batch = self._ios.requests_in_batch
        if len(self._known) > 2 * len(self._allocators) * len(batch) + _FORGOTTEN_LATE:
            in_batch = {future.state.request_id for future in batch}
            self._known = {key: value for key, value in self._known.items() if key[1] in in_batch}


def _lists_places(processor: Any) -> bool:
    """Whether this transformers fills the lists of places in the way that `_Places` takes over: from 5.18 on."""
    wanted = ["request_id", "past_length", "query_length", "read_index", "write_index"]
    extend = getattr(processor.cache, "extend_read_and_write_indices", None)
    ios = ("prepare_batch_tensors", "write_index_storage", "read_index_storage", "true_write_sizes", "true_read_sizes")
    allocators = getattr(processor.cache, "cache_allocators", None)
    return (
        extend is not None
        and list(inspect.signature(extend).parameters) == wanted
        and isinstance(allocators, dict)
        and all(hasattr(processor.inputs_and_outputs, name) for name in ios)
        and all(
            hasattr(allocator, name)
            for allocator in allocators.values()
            for name in ("block_table", "block_physical_stride", "tokens_per_page")
        )
    )


def _answer_as_a_cache(processor: Any) -> None:
    """Let models treat the paged cache as one of their own.

    From 5.24 on they store keys and values themselves. Some (OPT, BERT and its kin) first ask how much is in it, which they need
    only without positions; GPT-NeoX doesn't hand over the step's arguments, among which the cache looks for its places.
    """
    cache, ios = processor.cache, processor.inputs_and_outputs
    update, get_arguments = cache.update, ios.get_model_kwargs
    step: dict[str, Any] = {}

    def keep(*args: Any, **kwargs: Any) -> Any:
        step.clear()
        arguments = get_arguments(*args, **kwargs)
        step.update(arguments)
        return arguments

    def take(key: Tensor, value: Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
        stored: tuple[Tensor, Tensor] = update(key, value, layer_idx, kwargs=dict(step) if kwargs is None else kwargs)
        return stored

    cache.get_seq_length = lambda layer_idx=0: 0
    cache.update, ios.get_model_kwargs = take, keep


def _make_manager(model: nn.Module, num_pages: int, page_size: int, max_batch_tokens: int, max_requests: int) -> Any:
    names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    options: dict[str, Any] = {
        "page_size" if "page_size" in names else "block_size": page_size,
        "num_blocks": num_pages,
        "max_batch_tokens": max_batch_tokens,
        "max_requests_per_batch": min(max_requests, max_batch_tokens),
        "allow_block_sharing": False,  # rows of a shared prefix would never be computed
        "use_async_batching": False,
        "use_cuda_graph": False,  # a replayed graph runs no Python, so no tap either
        "auto_switch_to_flash": False,
        "seed": 0,
    }
    config = ContinuousBatchingConfig(**{name: value for name, value in options.items() if name in names})
    plain = GenerationConfig(do_sample=False, eos_token_id=-1)
    make = getattr(model, "init_continuous_batching", None)
    if make is None:
        raise EngineError(f"{type(model).__name__} has no continuous batching in this version of transformers")
    manager = make(generation_config=plain, continuous_batching_config=config)
    # Making the processor seeds torch's global generators; that is the caller's business.
    manager.distributed_helper.set_tp_seed = lambda *_: None
    return manager


def _check_shape(manager: Any, processor: Any) -> None:
    wanted = [
        (manager, ("add_request", "cancel_request")),
        (processor, ("prepare_next_batch", "_generation_step", "update_batch", "inputs_and_outputs", "model_runner")),
        (processor.inputs_and_outputs, ("requests_in_batch",)),
        (processor.model_runner, ("_sample",)),
        (processor.scheduler, ("block_new_requests",)),
    ]
    for owner, names in wanted:
        for name in names:
            if not hasattr(owner, name):
                raise EngineError(
                    f"this version of transformers has no {type(owner).__name__}.{name}, which batched generation uses"
                )
    if list(inspect.signature(processor.model_runner._sample).parameters)[:2] != ["scores", "output_ids"]:
        raise EngineError("this version of transformers calls ModelRunner._sample with other arguments")
    if processor.use_async_batching or any(processor.cb_config.cuda_graph_booleans):
        raise EngineError(
            "this version of transformers doesn't let CUDA graphs and asynchronous batching be turned off"
        )


def _capacity(processor: Any, page_size: int) -> int:
    cache = processor.cache
    try:
        from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens
    except ImportError:  # before 5.18
        return int(cache.num_blocks * page_size // getattr(cache, "num_groups", 1))
    return int(infer_max_single_request_tokens(cache))


class OneSequence:
    """One sequence through the model's own forward and cache, as the model's `generate` would run it.

    Without a cache each step is a plain forward of the whole sequence, with nothing but its ids.
    """

    def __init__(self, model: Any, prompt_ids: list[int], *, max_len: int, use_cache: bool = True) -> None:
        self._model = model
        self._ids = torch.tensor([prompt_ids], dtype=torch.long, device=model.device)
        self._first = True
        self._use_cache = use_cache
        self._kwargs: dict[str, Any] = {"use_cache": use_cache}
        if use_cache:
            self._prepare_cache(max_len)

    def _prepare_cache(self, max_len: int) -> None:
        model, kwargs = self._model, self._kwargs
        accepted = set(inspect.signature(model.forward).parameters)
        if "attention_mask" in accepted:
            kwargs["attention_mask"] = torch.ones_like(self._ids)
        if "position_ids" in accepted:
            kwargs["position_ids"] = model._prepare_position_ids_for_generation(self._ids, kwargs)
        if model._supports_logits_to_keep():
            kwargs["logits_to_keep"] = 1
        config = GenerationConfig(use_cache=True)
        model._prepare_cache_for_generation(config, kwargs, GenerationMode.GREEDY_SEARCH, 1, max_len)

    def prepare(self) -> tuple[dict[str, Any], int, int]:
        """The inputs of the next forward, how many tokens they are and the position of the first."""
        if not self._use_cache:
            return {"input_ids": self._ids, "use_cache": False}, self._ids.shape[1], 0
        step: dict[str, Any] = {"is_first_iteration": True} if self._first else {"next_sequence_length": 1}
        inputs = self._model.prepare_inputs_for_generation(self._ids, **step, **self._kwargs)
        count = int(inputs["input_ids"].shape[1])
        return inputs, count, self._ids.shape[1] - count

    def take(self, outputs: Any) -> None:
        """Keep the cache that a forward returned."""
        self._first = False
        if self._use_cache:
            self._kwargs = self._model._update_model_kwargs_for_generation(outputs, self._kwargs)

    def append(self, token_id: int) -> None:
        """The token that the next forward is fed."""
        fresh = torch.tensor([[token_id]], dtype=torch.long, device=self._ids.device)
        self._ids = torch.cat([self._ids, fresh], dim=1)
