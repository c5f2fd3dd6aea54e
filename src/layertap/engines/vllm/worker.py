"""The worker's side: installs the tap after the model was loaded, and runs it around each step.

No hook here may raise into the engine once it serves: what goes wrong is logged and fails the requests whose rows it costs.
"""

import atexit
import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from layertap.capture.options import StoreOptions
from layertap.engines.vllm import compat, prefix_cache
from layertap.engines.vllm.collector import Collector
from layertap.engines.vllm.configured import Configured, configured, num_writers
from layertap.engines.vllm.layers import Blocks, find_blocks
from layertap.engines.vllm.messages import Finish, Order
from layertap.engines.vllm.remote import RemoteCollector
from layertap.engines.vllm.residual import Rule, check_forms, decide, input_tap, probe
from layertap.engines.vllm.rowmap import Want
from layertap.engines.vllm.stages import Address, StageReceiver, StageSender, connect_stages
from layertap.engines.vllm.tap import MOST_STEPS, Tap
from layertap.engines.vllm.tapping import Entries
from layertap.engines.vllm.unpack import GatherRoom, Unpacker, want_of
from layertap.engines.vllm.writer import WriterSetup, make_recorder
from layertap.engines.vllm.writers import Writers, start_writers
from layertap.errors import EngineError, UnsupportedModelError
from layertap.writing.recorder import describe

logger = logging.getLogger(__name__)

WRITER_ENV = "LAYERTAP_VLLM_WRITER"
"""Where rows are hashed and written: "process", "thread" (of the engine's process), or "auto": a process where there is a GPU."""

_ENGINE = "_layertap_engine_id"
_PROBE_TOKENS = 8
_ADMISSION_SECONDS = 10.0
"""How long a step waits for the locks of requests that begin in it: readers may learn the paths when it is over. A store that takes
longer costs its readers the lock, and the engine this wait, once."""
_OUTSIDE_MARGIN_BYTES = 2 << 30
_FEWEST_STEPS = 3

_taps: dict[str, "WorkerTap | None"] = {}
"""Of the engines whose workers live in this process; None where another rank delivers the rows."""


def local_tap(engine_id: str) -> "WorkerTap | None":
    """The tap of an engine whose only worker lives in this process."""
    tap = _taps.get(engine_id)
    return tap if tap is not None and tap.is_alone else None


def close_tap(engine_id: str) -> None:
    """End an engine's tap in this process."""
    tap = _taps.pop(engine_id, None)
    if tap is not None:
        tap.close()


def tap_counts(engine_id: str) -> dict[str, float] | None:
    """The counts of this process's tap, if it is the one that publishes."""
    tap = _taps.get(engine_id)
    return None if tap is None else tap.counts()


def engine_of(config: Any) -> str:
    """The id under which the engine of this configuration has its tap in this process.

    Behind the installation vLLM gives the workers of further machines the first one's id.
    """
    return str(getattr(config, _ENGINE, config.kv_transfer_config.engine_id))


def is_installed(config: Any) -> bool:
    """Whether the tap was installed for the engine of this configuration in this process."""
    return engine_of(config) in _taps


def watch_load(worker: Any) -> None:
    """Install the tap when `worker` has loaded its model, if the connector is configured."""
    config = worker.vllm_config
    found = configured(config)
    if found is None:
        return
    original = worker.load_model

    @functools.wraps(original)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        install(worker, found)
        return result

    worker.load_model = load_model


def install(worker: Any, found: Configured) -> None:
    """Find the blocks, decide the residual rule, put the tap in, and wrap the runner's step.

    Raises:
        UnsupportedModelError, EngineError: vLLM stops at start with the reason.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    config, runner = worker.vllm_config, worker.model_runner
    compat.check_version()
    compat.check_config(config)
    prefix_cache.check(config, found)
    found = replace(found, options=share_of_memory(found.options, compat.rings_on_host(config)))
    model = runner.get_model()
    name = f"{config.model_config.model} ({type(model).__name__})"
    blocks = find_blocks(model, found.num_layers, config.compilation_config.static_forward_context)
    pp, tp = get_pp_group(), get_tp_group()
    with set_current_vllm_config(config):
        rule, entries = _decide(runner, model, blocks, found, name, pp)
    engine_id = engine_of(config)
    setattr(config, _ENGINE, engine_id)
    _taps[engine_id] = None
    if tp.rank_in_group != 0:  # the stream is the same on every rank
        return
    taps = tuple(layer for layer in sorted(found.layers) if (layer - 1 in blocks.local if layer else 0 in blocks.local))
    tap = Tap(
        taps,
        hidden_size=found.hidden_size,
        dtype=config.model_config.dtype,
        device=runner.device,
        max_rows=compat.token_budget(config),
        max_plans=config.scheduler_config.max_num_seqs,
        host_bytes=found.options.byte_budget(),
    )
    if tap.on_device:
        _warn_of_small_ring(tap)
    tap.install(blocks.local, rule, entries)
    _place_arena(tap, config, runner.device)
    unpacker = _unpacker(config, found, tap, pp)
    slack = 0
    if config.speculative_config is not None:
        slack = 2 * (int(config.speculative_config.num_speculative_tokens or 0) + 1)
    worker_tap = WorkerTap(tap, unpacker, taps, slack, is_alone=config.parallel_config.world_size == 1)
    worker_tap.wrap(runner)
    _taps[engine_id] = worker_tap
    atexit.register(close_tap, engine_id)
    logger.info("layertap: taps %s of %s, stream = %s", list(taps), name, "h + r" if rule == "sum" else "h")


def _decide(
    runner: Any, model: Any, blocks: Blocks, found: Configured, name: str, pp: Any
) -> tuple[Rule, dict[int, Entries]]:
    mixers = runner.compilation_config.static_forward_context.values()
    seen, output = probe(model, blocks, found.hidden_size, mixers, lambda: compat.run_dummy(runner, _PROBE_TOKENS))
    rule: Rule | None = None
    problem: str | None = None
    if pp.is_last_rank:
        try:
            rule = decide(seen, output if isinstance(output, torch.Tensor) else None, name)
        except UnsupportedModelError as exc:
            problem = str(exc)
    last_form = seen.forms.get(max(blocks.local), "other")
    if pp.world_size > 1:
        rule, problem, last_form = pp.broadcast_object((rule, problem, last_form), src=pp.world_size - 1)
    if rule is None:
        raise UnsupportedModelError(problem or f"{name}: the residual stream was not found")
    check_forms(seen.forms, last_form, rule, name)
    entries: dict[int, Entries] = {}
    for layer in found.layers:
        entry = input_tap(layer, seen.entries.get(layer), rule, name)
        if entry is not None:
            entries[layer] = entry
    if 0 in found.layers and 0 in blocks.local:
        if seen.hidden_argument is None:
            raise UnsupportedModelError(f"{name}: layer 0: the first block gets no tensor of the stream's width")
        entries[0] = (seen.hidden_argument, None)
    return rule, entries


def share_of_memory(options: StoreOptions, rings: int) -> StoreOptions:
    """Bound the bytes in flight, so that several engines or stages on one machine take no more of it together than one would."""
    if options.max_bytes_in_flight is not None:
        return options
    return replace(options, max_bytes_in_flight=max(1, options.byte_budget() // rings))


def _warn_of_small_ring(tap: Tap) -> None:
    """With room for one or two full steps the engine waits in each until the longest prompt of the one before is written."""
    steps, step_bytes = tap.host_ring.capacity / tap.step_cells, tap.step_cells * tap.cell_bytes
    if steps < _FEWEST_STEPS:
        logger.warning(
            "layertap: rows of a full step with all layers take %.1f GiB, and host memory for %.1f such steps is given: with full "
            "steps the engine will wait for the writers; max_bytes_in_flight=%d would hold %d (or: fewer layers, a smaller "
            "max_num_batched_tokens)",
            step_bytes / 2**30,
            steps,
            MOST_STEPS * step_bytes,
            MOST_STEPS,
        )


def _place_arena(tap: Tap, config: Any, device: torch.device) -> None:
    """Take the device arena from outside of vLLM's share where there is room, else from inside, so that vLLM accounts for it."""
    if device.type == "cpu":
        return
    total = torch.cuda.mem_get_info(device)[1]
    outside = total * (1 - config.cache_config.gpu_memory_utilization)
    if outside < tap.arena_bytes + _OUTSIDE_MARGIN_BYTES:
        tap.reserve_arena()


def _unpacker(config: Any, found: Configured, tap: Tap, pp: Any) -> Unpacker | RemoteCollector | Writers:
    dtype = config.model_config.dtype
    listener = connect_stages(pp) if pp.world_size > 1 else None
    if isinstance(listener, Address):
        return StageSender(listener, tap.taps, dtype)
    model = config.model_config
    gather = GatherRoom(
        num_requests=2 * config.scheduler_config.max_num_seqs, limit_bytes=found.options.byte_budget() // 4
    )
    setup = WriterSetup(
        options=found.options,
        model=str(model.model),
        num_layers=found.num_layers,
        facts={
            "engine": "vllm",
            "engine_version": compat.version(),
            "compute_dtype": compat.dtype_name(dtype),
            "revision": str(model.revision or ""),
            "quantization": str(model.quantization or ""),
            "residual": "single stream",
            "replica": str(compat.replica(config)),
        },
        taps=tap.taps,
        dtype=compat.dtype_name(dtype),
        num_cells=tap.host_ring.capacity,
        cell_bytes=tap.cell_bytes,
        gather=gather,
    )
    if listener is None and _wants_process(tap):
        return start_writers(setup, tap.cells, num_writers(found.options))
    if found.options.num_writer_processes is not None:
        logger.warning(
            "layertap: num_writer_processes is for engines on a GPU without pipeline stages; here threads write"
        )
    recorder = make_recorder(setup)
    collector = Collector(recorder, tap.taps, dtype, num_stages=pp.world_size, gather=gather)
    if listener is not None:
        StageReceiver(listener, collector, num_peers=pp.world_size - 1, limit_bytes=found.options.byte_budget())
    return collector


def _wants_process(tap: Tap) -> bool:
    """A writer process keeps Python's lock free for vLLM's loop; on the CPU the loop isn't what is short."""
    asked = os.environ.get(WRITER_ENV, "auto")
    if asked not in {"auto", "process", "thread"}:
        raise EngineError(f"{WRITER_ENV}: expected 'auto', 'process' or 'thread', got {asked!r}")
    return asked == "process" or (asked == "auto" and tap.on_device)


class WorkerTap:
    """Runs the tap around the steps of one runner.

    Attributes:
        is_alone: it is its engine's only worker.
    """

    def __init__(
        self,
        tap: Tap,
        unpacker: Unpacker | RemoteCollector | Writers,
        taps: tuple[int, ...],
        slack: int,
        *,
        is_alone: bool,
    ) -> None:
        self.is_alone = is_alone
        self.tap = tap
        self.unpacker = unpacker
        self._taps = taps
        self._slack = slack
        self._wants: dict[str, Want] = {}

    def wrap(self, runner: Any) -> None:
        """Wrap the runner's methods, on the instance."""
        runner.execute_model = self._around_step(runner.execute_model, v2=compat.uses_v2_runner(runner))
        if compat.uses_v2_runner(runner):
            runner.prepare_inputs = self._after_prepare_v2(runner.prepare_inputs)
        else:
            runner._prepare_inputs = self._after_prepare_v1(runner, runner._prepare_inputs)

    def apply(self, items: Sequence[Order | Finish]) -> None:
        """Take orders and endings."""
        for item in items:
            if isinstance(item, Order):
                self._wants[item.request_id] = want_of(item, self._taps)
                self.unpacker.order(item)
            else:
                self._wants.pop(item.request_id, None)
                self.unpacker.finish(item)

    def counts(self) -> dict[str, float]:
        """For metrics."""
        return {**self.unpacker.counts(), "device_bytes": self.tap.counts.bytes_copied}

    def close(self) -> None:
        """Publish what is finished, fail what isn't. Never raises."""
        try:
            self.tap.host_ring.close()
            self.unpacker.close()
            self.tap.close()
        except Exception:
            logger.exception("layertap: closing")

    def _around_step(self, original: Callable[..., Any], *, v2: bool) -> Callable[..., Any]:
        from layertap.engines.vllm.connector import news_of

        @functools.wraps(original)
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if v2 and compat.is_dummy_call((scheduler_output, *args), kwargs):
                return original(scheduler_output, *args, **kwargs)
            number, news = -1, None
            try:
                news = news_of(scheduler_output.kv_connector_metadata)
                if news is not None:
                    number = news.step
                    self.apply(news.items)
                    if news.prefix is not None:
                        self.unpacker.keep(news.prefix)
            except Exception as exc:  # noqa: BLE001 - logged; it costs rows, never the engine
                self._lose_all(exc)
            try:
                result = original(scheduler_output, *args, **kwargs)
            except BaseException:
                self.tap.cancel()
                raise
            try:
                step = self.tap.end(number)
                if step is not None:
                    self.unpacker.step(step)
                if news is not None and news.prefix is not None:
                    self.unpacker.reuse(number, news.prefix)
                self.unpacker.wait_for_admissions(_ADMISSION_SECONDS)
            except Exception as exc:  # noqa: BLE001 - logged; it costs rows, never the engine
                self._lose_all(exc)
            return result

        return execute_model

    def _after_prepare_v1(self, runner: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare_inputs(scheduler_output: Any, num_scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scheduler_output, num_scheduled, *args, **kwargs)
            self._begin(lambda: compat.layout_v1(runner, num_scheduled))
            return result

        return prepare_inputs

    def _after_prepare_v2(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            batch = original(*args, **kwargs)
            self._begin(lambda: compat.layout_v2(batch))
            return batch

        return prepare_inputs

    def _begin(self, layout: Callable[[], compat.Layout]) -> None:
        if not self._wants:
            return
        try:
            self.tap.begin(layout(), self._wants, self._slack)
        except Exception as exc:  # noqa: BLE001 - logged; it costs rows, never the engine
            self._lose_all(exc)

    def _lose_all(self, exc: Exception) -> None:
        logger.error("layertap: the rows of a step are lost", exc_info=exc)
        try:
            self.tap.cancel()
        except Exception:
            logger.exception("layertap: the tap's maps could not be reset")
        lost, self._wants = set(self._wants), {}
        self.unpacker.lose(lost, f"the tap failed: {describe(exc)}")
