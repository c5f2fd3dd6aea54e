"""`HiddenStatesConnector`: a store-only KV connector of vLLM that moves no KV.

Its scheduler half turns requests into orders and tells the workers how they ended; rows are taken by the tap, not by the connector.
KV blocks are never held, prefix caching stays on: a request whose prompt rows are owed doesn't read the prefix cache, but fills it;
with `prefix_rows_bytes` it reads those blocks whose rows are on the host.

Importing this module activates layertap in this process: vLLM imports it when, and only when, the connector is configured.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from layertap.engines.vllm import activate, compat, prefix_cache, worker
from layertap.engines.vllm.configured import configured
from layertap.engines.vllm.idle import IdleSteps
from layertap.engines.vllm.messages import Finish, News, Order
from layertap.engines.vllm.metrics import HiddenStatesProm, HiddenStatesStats, Reporter
from layertap.engines.vllm.orders import CHOICES_KEY, ERROR_KEY, Asked, OrderDesk, handle
from layertap.engines.vllm.prefix_plan import PrefixPlan
from layertap.engines.vllm.stops import StopFinder
from layertap.errors import EngineError
from layertap.files.claims import taken_by_another
from layertap.files.publish import write_error
from layertap.writing.recorder import describe
from layertap.writing.shipping import said_handle

logger = logging.getLogger(__name__)

activate.activate()


@dataclass
class NewsMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What goes to the workers with each step."""

    news: News


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        compat.check_version()
        compat.check_config(vllm_config)
        found = configured(vllm_config)
        assert found is not None
        self._engine_id = worker.engine_of(vllm_config)
        self._desk: OrderDesk | None = None
        self._plan: PrefixPlan | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._plan = prefix_cache.make_plan(vllm_config, found)
            self._desk = OrderDesk(found, vllm_config.model_config.max_model_len)
        elif not worker.is_installed(vllm_config):
            raise EngineError(
                "layertap's tap isn't in the model: its plugin was not active when the worker loaded the model. Is layertap "
                "installed in the worker's environment, and allowed by VLLM_PLUGINS (plugin name 'layertap')?"
            )
        self._stops = StopFinder(vllm_config.model_config)
        self.idle = IdleSteps()
        self._reporter = Reporter()
        self._num_refused = 0
        self._news = News(step=0)
        self._orders: dict[str, Order] = {}
        self._refused: dict[str, str] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        """Blocks are never read, so a preempted request may finish as it is."""
        return False

    # Scheduler's side.

    def on_new_request(self, request: Any) -> None:
        """Take an order. Never raises: that would end the engine."""
        try:
            self._take_order(request)
        except Exception as exc:  # told to the reader, see _refuse
            if not isinstance(exc, ValueError | OSError):
                logger.exception("layertap: request %s", request.request_id)
            self._refuse(request, describe(exc), exists=isinstance(exc, FileExistsError))

    def _take_order(self, request: Any) -> None:
        assert self._desk is not None
        if request.sampling_params is None:
            return
        params = request.kv_transfer_params
        order = self._desk.order(
            Asked(
                request_id=request.request_id,
                params=params,
                prompt_len=request.num_prompt_tokens,
                max_tokens=request.max_tokens,
                has_token_ids=request.prompt_token_ids is not None and request.prompt_embeds is None,
                lora=None if request.lora_request is None else str(request.lora_request.lora_name),
            )
        )
        if order is None:
            return
        self._desk.reserve_tag(order, int((params or {}).get(CHOICES_KEY, 1)))
        if self._plan is not None and not getattr(request, "resumable", False):
            self._plan.admit(request.request_id, request, order.spec)
            prefix_cache.attach(self._plan, request)
        elif order.spec.candidates.start < request.num_prompt_tokens - 1:
            # rows of cached blocks aren't computed again; the last prompt token always is
            request.skip_reading_prefix_cache = True
        self._orders[request.request_id] = order
        self._tell(order)

    def _refuse(self, request: Any, reason: str, *, exists: bool) -> None:
        self._refused[request.request_id] = reason
        self._num_refused += 1
        logger.warning("layertap: request %s is refused: %s", request.request_id, reason)
        request.max_tokens = 1  # an abort from here would leave the front end waiting
        if exists or self._desk is None:
            return
        try:
            path = self._desk.fallback_path(request.request_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_error(path, reason, request.request_id)
        except OSError as exc:
            logger.warning("layertap: request %s: its error can't be put on record: %s", request.request_id, exc)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell the workers; the blocks are free at once."""
        try:
            return False, self._finish(request)
        except Exception:  # raising would end the engine
            logger.exception("layertap: the end of request %s", request.request_id)
            return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished_all_groups."""
        return self.request_finished_all_groups(request, (block_ids,))

    def _finish(self, request: Any) -> dict[str, Any] | None:
        refused = self._refused.pop(request.request_id, None)
        if refused is not None:
            return {ERROR_KEY: refused}
        order = self._orders.pop(request.request_id, None)
        if order is None:
            return None
        self.idle.ended()
        if self._plan is not None:
            self._plan.finish(request.request_id)
        finished = request.get_finished_reason()
        reason = "abort" if finished is None else str(finished)
        failure, tokens = None, list(request.all_token_ids)
        kept = self._stops.kept_output_tokens(request) if reason == "abort" else None
        if kept is not None:
            reason, tokens = "stop", tokens[: request.num_prompt_tokens + kept]
        elif reason == "abort":
            failure = "the request was aborted before it was finished"
        elif reason not in {"stop", "length", "repetition"}:
            failure = f"the engine ended the request with {reason!r}"
        if order.prefill and failure is None:
            tokens, reason = list(request.prompt_token_ids), "prefill"
        taken = taken_by_another(Path(order.path), order.public_id, overwrite=order.overwrite)
        self._tell(
            Finish(
                request_id=request.request_id,
                token_ids=tuple(tokens),
                finish_reason=reason,
                failure=taken or failure,
            )
        )
        if taken is not None:
            logger.warning("layertap: request %s has no hidden states: %s", order.public_id, taken)
            return {ERROR_KEY: taken}
        assert self._desk is not None
        return said_handle(self._desk.configured.options.handover, handle(order))

    def _tell(self, item: Order | Finish) -> None:
        local = worker.local_tap(self._engine_id)
        if local is None:
            self._news.items.append(item)
        else:  # the worker lives in this process: it must not have to wait for a step that may never come
            local.apply([item])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What happened since the last step."""
        self.idle.stepped()
        news, self._news = self._news, News(step=self._news.step + 1)
        if self._plan is not None:
            try:
                news.prefix = self._plan.plan(compat.scheduled(scheduler_output))
            except Exception:  # raising would end the engine; captures that miss rows fail
                logger.exception("layertap: rows of cached blocks")
                self._plan.reset()
        return NewsMetadata(news)

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine is to make a step, for metrics."""
        return self.idle.wanted

    def update_connector_output(self, connector_output: Any) -> None:
        """Forget kept rows when workers lost some."""
        stats = connector_output.kv_connector_stats
        if self._plan is not None and stats is not None and stats.data.get("prefix_lost"):
            self._plan.reset()

    def reset_cache(self) -> bool:
        """Forget kept rows."""
        if self._plan is not None:
            self._plan.reset()
        return True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    # Worker's side: the tap works without these hooks.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """No KV is saved."""

    def wait_for_save(self) -> None:
        """No KV is saved."""

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What changed since the last step, for vLLM's metrics."""
        try:
            if self.role == KVConnectorRole.SCHEDULER:
                kept = {} if self._plan is None else self._plan.counts()
                return self._reporter.report({"refused": self._num_refused, **kept})
            counts = worker.tap_counts(self._engine_id)
            return None if counts is None else self._reporter.report(counts)
        except Exception:  # numbers aren't worth an engine
            logger.exception("layertap: metrics")
            return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """A report that came from another process."""
        return HiddenStatesStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HiddenStatesProm:
        """The metrics that vLLM's front end shows."""
        return HiddenStatesProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Publish what is finished, fail what isn't."""
        self.idle.close()
        if self.role == KVConnectorRole.WORKER:
            worker.close_tap(self._engine_id)


def news_of(metadata: Any) -> News | None:
    """Our part of a step's connector metadata, also inside MultiConnector's."""
    if isinstance(metadata, NewsMetadata):
        return metadata.news
    inner: Sequence[Any] = getattr(metadata, "metadata", None) or ()
    for child in inner:
        news = news_of(child)
        if news is not None:
            return news
    return None
