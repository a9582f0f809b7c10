"""The cluster as one engine: metrics under other engines' names on the HTTP edge's `/metrics`.

Counters and histograms cover this router's requests; running and waiting requests are those of the whole cluster, which
the schedulers report when the endpoint is scraped. It has its own registry: with these series on the router's metrics
port, a scraper that also reads the workers would count everything twice.
"""

from collections import Counter
from itertools import product
from typing import TYPE_CHECKING

from lorrery.router.request import Finish, Usage
from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.engine_metrics import EndedRequest, EngineMetrics, EngineState, KvCache
from lorrery.service.telemetry.engine_series import PARSE_MODES, PARSE_OUTCOMES, PARSED_REQUESTS, TOOL_PARSES
from lorrery.service.telemetry.output_groups import OutputGroup, OutputGroups
from lorrery.service.telemetry.series import Exporter, Labelled, Number, Registry
from lorrery.vocabulary.endings import MEANINGS, CancelCause, FinishReason

if TYPE_CHECKING:
    from lorrery.v1 import router_pb2

ABORTED = frozenset(
    MEANINGS[cause].at_the_edge for cause in (CancelCause.CLIENT_LEFT, CancelCause.ABORTED, CancelCause.DEADLINE)
)
"""Outcomes of requests whose clients gave them up, which SGLang counts; vLLM's series do not."""
FAILED = frozenset({"unavailable", "unattainable", "fault", "failed"})


class EdgeEngine:
    """The metrics under other engines' names, as those of one engine.

    Args:
        settings: of the cluster.

    Attributes:
        registry: where the metrics are registered.
    """

    def __init__(self, settings: Settings) -> None:
        own = settings.scheduler
        self.registry = Registry()
        self._settings = settings
        self._metrics = EngineMetrics(
            self.registry,
            settings.served_model_names[0],
            own.max_req_total_len,
            KvCache(
                0,
                own.block_size,
                settings.worker.kv_dtype,
                own.prefix_cache.kind != "none",
                own.max_req_total_len,
                settings.worker.gpu_memory_utilization,
            ),
            vllm=settings.metrics.vllm,
            sglang=settings.metrics.sglang,
            quirks=settings.router.vllm_quirks,
        )
        if not settings.router.vllm_quirks:
            self._metrics.adapters_known()
        self._model = settings.served_model_names[0]
        self._tool_parses = Labelled(Number)
        if settings.metrics.vllm and settings.router.tool_calls == "auto":
            self._tool_parses = Exporter(self.registry, (TOOL_PARSES,)).numbers(TOOL_PARSES)
            for labels in product(PARSE_MODES, PARSE_OUTCOMES, PARSED_REQUESTS):
                self._tool_parses.labels(self._model, *labels)
        self._waiting: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._generated = 0
        self._groups = OutputGroups()

    @classmethod
    def of(cls, settings: Settings) -> "EdgeEngine | None":
        """Return an instance if the settings ask for such metrics and there is an HTTP edge, else None."""
        shown = settings.metrics.vllm or settings.metrics.sglang
        return cls(settings) if shown and settings.router.http is not None else None

    # --- requests ---------------------------------------------------------------------------------------------------

    def submitted(self, adapter_id: str) -> None:
        """Record a request submitted to a scheduler."""
        self._waiting[adapter_id] += 1

    def started(self, adapter_id: str, ttft_seconds: float, prompt_tokens: int) -> None:
        """Count a request's first token."""
        self._waiting[adapter_id] -= 1
        self._running[adapter_id] += 1
        self._metrics.first_token(ttft_seconds, prompt_tokens)

    def gaps(self, seconds: float, times: int) -> None:
        """Count gaps between tokens."""
        self._metrics.gaps(seconds, times)

    def finished(self, prompt_tokens: int, max_tokens: int, finish: Finish, group: OutputGroup | None = None) -> None:
        """Count a request that finished by itself, or one output of a group; `finish` is its scheduler's."""
        usage, metrics = finish.usage, self._metrics
        self.looked_up(usage)
        reason = "length" if finish.reason is FinishReason.LENGTH else "stop"
        metrics.preempted(usage.num_requeues)
        # vLLM has no phase for adapter loads: the wait counts as queueing before the admission, as prefill after it.
        queue_seconds = usage.waited_seconds
        prefill_seconds = max(
            0.0, usage.queue_seconds + usage.adapter_load_seconds + usage.prefill_seconds - queue_seconds
        )
        metrics.ended(
            EndedRequest(
                reason,
                prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                max_tokens,
                usage.num_requeues,
                queue_seconds,
                prefill_seconds,
                usage.decode_seconds,
            )
        )
        whole = self._groups.finished(group, usage.completion_tokens)
        if whole is not None:
            metrics.request_ended(*whole)

    def looked_up(self, usage: Usage) -> None:
        """Count what a request with a first token had in the prefix cache, which only the usage at its end tells."""
        metrics = self._metrics
        metrics.cached(usage.prompt_tokens if metrics.cache.prefix_caching else 0, usage.cached_tokens)
        metrics.prompt_sources(usage.prompt_tokens, usage.cached_tokens)

    def ended(self, outcome: str, adapter_id: str, *, submitted: bool, started: bool) -> None:
        """Record the end of a call, whatever its outcome."""
        if started:
            self._running[adapter_id] -= 1
        elif submitted:
            self._waiting[adapter_id] -= 1
        if outcome == "overloaded" and not started:  # not because its reader is too slow
            self._metrics.rejections["max_num_queued_reqs"].inc()
        elif outcome in ABORTED:
            self._metrics.num_aborted.inc()
        elif outcome in FAILED:
            self._metrics.success["error"].inc()

    def tool_parsed(self, request_type: str, *, is_streaming: bool, called: bool) -> None:
        """Count a reading of output for calls of tools: once per message of a stream, else once per output.

        Args:
            request_type: one of `PARSED_REQUESTS`.
            is_streaming: whether the output is streamed.
            called: whether a part of a call was found.
        """
        mode, outcome = PARSE_MODES[not is_streaming], PARSE_OUTCOMES[not called]
        self._tool_parses.labels(self._model, mode, outcome, request_type).inc()

    # --- scrapes ----------------------------------------------------------------------------------------------------

    def update(self, output_tokens: int, status: "router_pb2.GetClusterStatusResponse | None") -> None:
        """Update the gauges and the token counter.

        Args:
            output_tokens: total written by the router.
            status: of the cluster; None: unknown.
        """
        metrics = self._metrics
        metrics.generated(output_tokens - self._generated)
        metrics.made(output_tokens - self._generated)
        self._generated = output_tokens
        self._waiting, self._running = +self._waiting, +self._running
        workers = [worker for shard in status.shards for worker in shard.workers] if status is not None else []
        pool_tokens = sum(worker.max_total_token_num for worker in workers)
        before = metrics.state
        metrics.cache.pool_tokens = pool_tokens
        metrics.state = EngineState(
            num_running=sum(worker.num_running for worker in workers),
            num_waiting=sum(worker.num_waiting for worker in workers)
            + (sum(shard.num_unplaced for shard in status.shards) if status is not None else 0),
            kv_usage=sum(worker.kv_tokens for worker in workers) / max(1, pool_tokens),
            max_loras=(self._settings.adapters.max_loras or 0) * len(workers),
            running_adapters=tuple(name for name in self._running if name),
            waiting_adapters=tuple(name for name in self._waiting if name),
            adapters={name: (True, False) for worker in workers for name in worker.resident_adapters},
        )
        after = metrics.state
        if (before.running_adapters, before.waiting_adapters) != (after.running_adapters, after.waiting_adapters):
            metrics.adapters_known()
