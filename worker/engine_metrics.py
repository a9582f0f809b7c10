"""What a worker shows under other engines' names: its own steps, and the scheduler's counts for its replica.

The scheduler sends its counts with each plan, and with heartbeat answers when something has changed. Without a
scheduler the gauges show nothing running, waiting or in memory; counters keep their values.
"""

from collections.abc import Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry

from lorrery.service.settings.cluster import Settings
from lorrery.service.telemetry.engine_metrics import EndedRequest, EngineMetrics, EngineState, KvCache
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary.endings import FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND

REASONS = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Engine:
    """One GPU's metrics under other engines' names.

    Args:
        settings: of the cluster.
        registry: where the metrics are registered.
        pool_tokens: KV pool of the worker; shown until the scheduler sends the size that it uses.
        number: of this GPU among those of the process.
    """

    def __init__(self, settings: Settings, registry: CollectorRegistry, pool_tokens: int, number: int = 0) -> None:
        own = settings.scheduler
        cache = KvCache(
            pool_tokens,
            own.block_size,
            settings.worker.kv_dtype,
            own.prefix_cache.kind != "none",
            own.max_req_total_len,
            settings.worker.gpu_memory_utilization,
        )
        self._metrics = EngineMetrics(
            registry,
            settings.served_model_names[0],
            own.max_req_total_len,
            cache,
            vllm=settings.metrics.vllm,
            sglang=settings.metrics.sglang,
            rank=number if settings.worker.gpus > 1 else None,
            quirks=settings.router.vllm_quirks,
        )
        self._max_loras = settings.adapters.max_loras or 0
        self._metrics.state = self._idle()
        self._adapters: dict[str, tuple[bool, bool]] = {}
        self._now_ps = 0  # sum of step times and the gaps between them
        self._decoded_ps = 0  # when all decoding sequences but those in `_joined` had their last token
        self._joined: list[tuple[int, int]] = []  # time of joining, number of sequences

    @classmethod
    def of(cls, settings: Settings, registry: CollectorRegistry, pool_tokens: int, number: int = 0) -> "Engine | None":
        """Return an instance if the settings ask for any such metrics, else None."""
        shown = settings.metrics
        return cls(settings, registry, pool_tokens, number) if shown.vllm or shown.sglang else None

    def _idle(self) -> EngineState:
        return EngineState(max_loras=self._max_loras)

    # --- steps ------------------------------------------------------------------------------------------------------

    def stepped(
        self, prefill_tokens: int, output_tokens: int, num_sampled: int, num_joined: int, since_ps: int
    ) -> None:
        """Count a step.

        Args:
            prefill_tokens: prompt tokens computed.
            output_tokens: tokens produced, first ones included.
            num_sampled: output tokens that came from prefills.
            num_joined: of these sequences, those that go on to decode.
            since_ps: time from the end of the previous step to the end of this one.
        """
        metrics = self._metrics
        self._now_ps = now_ps = self._now_ps + since_ps
        metrics.step(prefill_tokens + output_tokens)
        metrics.made(output_tokens)
        num_decoded = output_tokens - num_sampled
        if num_decoded:
            for joined_ps, num_new in self._joined:
                num_there = min(num_new, num_decoded)  # some may have been cancelled
                num_decoded -= num_there
                metrics.gaps((now_ps - joined_ps) / PS_PER_SECOND, num_there)
            self._joined.clear()
            if num_decoded:
                metrics.gaps((now_ps - self._decoded_ps) / PS_PER_SECOND, num_decoded)
            self._decoded_ps = now_ps
        if num_joined:
            self._joined.append((now_ps, num_joined))

    def decoded(self, num_tokens: int, since_ps: Sequence[int]) -> None:
        """Count steps that only decode the same sequences.

        Args:
            num_tokens: tokens that each step gave, at least one.
            since_ps: for each step, the time from the end of the step before to its own end.
        """
        first_ps, *others_ps = since_ps
        self.stepped(0, num_tokens, 0, 0, first_ps)
        if others_ps:
            self._decoded_ps = self._now_ps = self._now_ps + sum(others_ps)
            self._metrics.decoded([one_ps / PS_PER_SECOND for one_ps in others_ps], num_tokens)

    # --- the scheduler's counts -------------------------------------------------------------------------------------

    def attach(self, *, attached: bool) -> None:
        """Show nothing running, waiting or in memory; called at the start and at the end of an attachment."""
        del attached
        self._adapters = {}
        self._joined.clear()
        before, self._metrics.state = self._metrics.state, self._idle()
        if before.running_adapters or before.waiting_adapters:
            self._metrics.adapters_known()

    def take(self, said: pb.EngineCounts) -> None:
        """Show the scheduler's counts.

        Raises:
            ValueError: arrays that must have one length have not.
        """
        metrics, before = self._metrics, self._metrics.state
        if said.HasField("config"):
            config = said.config
            self._max_loras = config.max_loras
            metrics.cache = replace(
                metrics.cache,
                pool_tokens=config.pool_tokens,
                block_size=config.block_size,
                prefix_caching=config.prefix_caching,
            )
        running, waiting = before.running_adapters, before.waiting_adapters
        if said.HasField("adapters"):
            running, waiting = tuple(said.adapters.running), tuple(said.adapters.waiting)
        if said.places:
            self._adapters = self._adapters | {place.adapter_id: (place.gpu, place.host) for place in said.places}
            self._adapters = {name: place for name, place in self._adapters.items() if any(place)}
        metrics.state = EngineState(
            num_running=said.num_running,
            num_waiting=said.num_waiting,
            num_deferred=said.num_deferred,
            kv_usage=said.kv_usage,
            max_loras=self._max_loras,
            running_adapters=running,
            waiting_adapters=waiting,
            adapters=self._adapters,
        )
        if said.HasField("config") or said.HasField("adapters"):
            metrics.adapters_known()
        if said.num_preemptions:
            metrics.preempted(said.num_preemptions)
        if said.prefix_queries:
            metrics.cached(said.prefix_queries, said.prefix_hits)
        metrics.generated(said.generated_tokens)
        metrics.num_aborted.inc(said.num_aborted)
        metrics.success["error"].inc(said.num_failed)
        for ttft_ps, prompt_tokens, cached_tokens in zip(
            said.first_token_ps, said.first_prompt_tokens, said.first_cached_tokens, strict=True
        ):
            metrics.first_token(ttft_ps / PS_PER_SECOND, prompt_tokens)
            metrics.prompt_sources(prompt_tokens, cached_tokens)
        for num_outputs, longest_tokens in zip(said.request_outputs, said.request_longest_tokens, strict=True):
            metrics.request_ended(num_outputs, longest_tokens)
        for load_ps in said.host_load_ps:
            metrics.loaded("host", load_ps / PS_PER_SECOND)
        for load_ps in said.disk_load_ps:
            metrics.loaded("disk", load_ps / PS_PER_SECOND)
        if said.ended_reasons:
            self._take_ended(said)

    def _take_ended(self, said: pb.EngineCounts) -> None:
        columns = (
            said.ended_prompt_tokens,
            said.ended_cached_tokens,
            said.ended_output_tokens,
            said.ended_max_tokens,
            said.ended_requeues,
        )
        times = (said.ended_queue_ps, said.ended_prefill_ps, said.ended_decode_ps)
        for reason, *row in zip(said.ended_reasons, *columns, *times, strict=True):
            numbers, seconds = row[: len(columns)], [ps / PS_PER_SECOND for ps in row[len(columns) :]]
            word = REASONS.get(FinishReason.of(reason), "error")
            self._metrics.ended(EndedRequest(word, *numbers, *seconds))
