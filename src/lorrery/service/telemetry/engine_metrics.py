"""Metrics of an engine under other engines' names: of a worker, or of a router's cluster as one engine.

The owner counts in plain numbers, in the event loop's thread; a scrape reads them in another thread. Times are device
seconds.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from lorrery.service.telemetry.engine_series import (
    CACHE_CONFIG,
    FINISHED_REASONS,
    SLEEP_STATES,
    sglang_series,
    vllm_series,
)
from lorrery.service.telemetry.series import Exporter, Histogram, Number, Sample, Series, Throughput

REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
MAX_STALE = 1000
"""Samples of `vllm:lora_requests_info` kept under vLLM's quirks; vLLM keeps all."""
TRANSITIONS = {"disk": "load", "host": "activate"}
"""Tier that an adapter is loaded from -> name of the load in vLLM."""


PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHE_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
"""vLLM's sources of prompt tokens, and tiers of its caches; here there is no cache but the device's."""


@dataclass(slots=True)
class KvCache:
    """Properties of an engine's KV cache.

    Attributes:
        pool_tokens: its size.
        block_size: tokens in a block.
        dtype: number format.
        prefix_caching: whether prompts share cached prefixes.
        max_model_len: upper bound on prompt plus output.
        memory_share: of the GPU's memory that engine and cache use.
    """

    pool_tokens: int = 0
    block_size: int = 16
    dtype: str = "auto"
    prefix_caching: bool = False
    max_model_len: int = 0
    memory_share: float = 0.92

    @property
    def num_blocks(self) -> int:
        """Whole blocks in the pool."""
        return self.pool_tokens // max(1, self.block_size)


@dataclass(slots=True)
class EngineState:
    """The current state of an engine; may be replaced, or changed in place.

    Attributes:
        kv_usage: share of the pool in use.
        num_deferred: waiting requests that wait for their adapter.
        max_loras: slots for adapters on the GPU.
        running_adapters: names of adapters of running requests, in order.
        waiting_adapters: the same for waiting requests.
        adapters: name of each adapter in memory -> whether it is on the GPU, whether it is in host memory.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    kv_usage: float = 0.0
    max_loras: int = 0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    adapters: Mapping[str, tuple[bool, bool]] = field(default_factory=dict)


class EndedRequest(NamedTuple):
    """A request that finished by itself; its seconds add up to the time from arrival to end."""

    reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    num_preemptions: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float


class EngineMetrics:
    """Counts of one engine, shown under the names of others.

    Args:
        registry: where the metrics are registered.
        model: the served model name.
        max_model_len: upper bound on prompt plus output, in tokens.
        cache: of the engine; may change.
        vllm: whether to show vLLM's series.
        sglang: whether to show SGLang's series.
        read: called at each scrape, in its thread, for the current state; None: `state` is used.
        rank: of the engine among those of a process; None: the only one.
        quirks: whether to show adapters as vLLM 0.32 does; see `router.vllm_quirks`.

    Attributes:
        state: the current state.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model: str,
        max_model_len: int,
        cache: KvCache,
        *,
        vllm: bool,
        sglang: bool,
        read: Callable[[], EngineState] | None = None,
        rank: int | None = None,
        quirks: bool = False,
    ) -> None:
        self.state = EngineState()
        self.cache = cache
        self._quirks = quirks
        self._adapters_known: dict[tuple[str, ...], float] = {}  # labels of information about adapters, Unix time of it
        self.rejections = {reason: Number() for reason in REJECTIONS}
        self.success = {reason: Number() for reason in FINISHED_REASONS}
        self.num_aborted = Number()
        self._made_tokens = Number()
        self._by_source = {source: Number() for source in PROMPT_SOURCES}
        self._cached_by_source = {source: Number() for source in CACHE_SOURCES}
        self._read = read or (lambda: self.state)
        self._model = model
        self._engine = str(rank or 0)
        series = self._series = vllm_series(max_model_len)
        self._counts = {name: Number() for name, one in series.items() if one.type == "counter"}
        self._histograms = {name: Histogram(one.buckets) for name, one in series.items() if one.buckets}
        self._loads = {name: Histogram(series["lora_adapter_load_seconds"].buckets) for name in TRANSITIONS.values()}
        self._sglang = sglang_series()
        self._sglang_histograms = {name: Histogram(one.buckets) for name, one in self._sglang.items() if one.buckets}
        if vllm:
            self._show_vllm(Exporter(registry, tuple(series.values())))
        if sglang:
            constant = None if rank is None else {"dp_rank": str(rank)}  # as for SGLang's data-parallel ranks
            self._show_sglang(Exporter(registry, tuple(self._sglang.values()), constant))

    # --- counting ---------------------------------------------------------------------------------------------------

    def first_token(self, ttft_seconds: float, prompt_tokens: int) -> None:
        """Count a request's first token and its prompt."""
        self._histograms["time_to_first_token_seconds"].observe(ttft_seconds)
        self._sglang_histograms["time_to_first_token_seconds"].observe(ttft_seconds)
        self._counts["prompt_tokens_total"].inc(prompt_tokens)

    def prompt_sources(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Count how much of a prompt with a first token was computed, and how much a prefix cache had."""
        self._counts["prompt_tokens_cached_total"].value += cached_tokens
        self._by_source["local_compute"].value += prompt_tokens - cached_tokens
        self._by_source["local_cache_hit"].value += cached_tokens

    def generated(self, num_tokens: int) -> None:
        """Count generated tokens that their requests keep."""
        self._counts["generation_tokens_total"].value += num_tokens

    def made(self, num_tokens: int) -> None:
        """Count tokens that a step has generated, whether their requests keep them or not, for the throughput."""
        self._made_tokens.value += num_tokens

    def gaps(self, seconds: float, times: int) -> None:
        """Count `times` equal gaps between two tokens of a request."""
        self._histograms["inter_token_latency_seconds"].observe_many(seconds, times)
        self._sglang_histograms["inter_token_latency_seconds"].observe_many(seconds, times)

    def decoded(self, gap_seconds: Collection[float], num_tokens: int) -> None:
        """Count steps that each gave so many requests a token, by the time since the one before."""
        self._histograms["inter_token_latency_seconds"].observe_each(gap_seconds, num_tokens)
        self._sglang_histograms["inter_token_latency_seconds"].observe_each(gap_seconds, num_tokens)
        self._histograms["iteration_tokens_total"].observe_many(num_tokens, len(gap_seconds))
        self.made(num_tokens * len(gap_seconds))

    def step(self, num_tokens: int) -> None:
        """Count a step by the number of tokens that it computed."""
        self._histograms["iteration_tokens_total"].observe(num_tokens)

    def cached(self, queries: int, hits: int) -> None:
        """Count tokens looked up in the prefix cache, and hits."""
        self._counts["prefix_cache_queries_total"].value += queries
        self._counts["prefix_cache_hits_total"].value += hits
        self._cached_by_source["device"].value += hits

    def preempted(self, times: int) -> None:
        """Count preemptions."""
        self._counts["num_preemptions_total"].value += times

    def loaded(self, tier: str, seconds: float) -> None:
        """Count the load of an adapter from a tier."""
        self._loads[TRANSITIONS[tier]].observe(seconds)

    def request_ended(self, num_outputs: int, longest_tokens: int) -> None:
        """Count a client's request of which all outputs have finished; `longest_tokens`: of the longest."""
        self._histograms["request_params_n"].observe(num_outputs)
        self._histograms["request_max_num_generation_tokens"].observe(longest_tokens)

    def ended(self, request: EndedRequest) -> None:
        """Count an output that has finished; see `request_ended` for requests with several."""
        observed = self._histograms
        self.success[request.reason].inc()
        inference = request.prefill_seconds + request.decode_seconds
        e2e = request.queue_seconds + inference
        for name, seconds in (
            ("request_queue_time_seconds", request.queue_seconds),
            ("request_prefill_time_seconds", request.prefill_seconds),
            ("request_decode_time_seconds", request.decode_seconds),
            ("request_inference_time_seconds", inference),
            ("e2e_request_latency_seconds", e2e),
        ):
            observed[name].observe(seconds)
        self._sglang_histograms["e2e_request_latency_seconds"].observe(e2e)
        mean = request.decode_seconds / (request.output_tokens - 1) if request.output_tokens > 1 else 0.0
        observed["request_time_per_output_token_seconds"].observe(mean)
        for name, number in (
            ("request_prompt_tokens", request.prompt_tokens),
            ("request_generation_tokens", request.output_tokens),
            ("request_prefill_kv_computed_tokens", request.prompt_tokens - request.cached_tokens),
            ("request_params_max_tokens", request.max_tokens),
            ("request_num_preemptions", request.num_preemptions),
        ):
            observed[name].observe(number)

    def adapters_known(self) -> None:
        """Record that the information about adapters in the state is current."""
        state = self._read()
        running, waiting = ",".join(state.running_adapters), ",".join(state.waiting_adapters)
        labels = str(state.max_loras), running if self._quirks else waiting, running
        known = {key: value for key, value in self._adapters_known.items() if self._quirks and key != labels}
        known[labels] = time.time()
        if len(known) > MAX_STALE:
            del known[next(iter(known))]
        self._adapters_known = known  # scrapes are in another thread

    # --- showing ----------------------------------------------------------------------------------------------------

    def _show_vllm(self, shown: Exporter) -> None:
        series, labels = self._series, (self._model, self._engine)

        def gauge(name: str, read: Callable[[EngineState], float]) -> None:
            shown.read(series[name], lambda: [(labels, read(self._read()))])

        gauge("num_requests_running", lambda state: state.num_running)
        gauge("num_requests_waiting", lambda state: state.num_waiting)
        gauge("kv_cache_usage_perc", lambda state: state.kv_usage)
        gauge("gpu_cache_usage_perc", lambda state: state.kv_usage)
        gauge("max_gpu_lora_adapters", lambda state: state.max_loras)
        gauge("num_gpu_loaded_lora_adapters", lambda state: sum(gpu for gpu, _ in list(state.adapters.values())))
        gauge("num_cpu_loaded_lora_adapters", lambda state: sum(host for _, host in list(state.adapters.values())))
        shown.read(series["num_requests_waiting_by_reason"], lambda: self._by_reason(labels))
        shown.read(
            series["engine_sleep_state"], lambda: [((*labels, state), state == "awake") for state in SLEEP_STATES]
        )
        by_reason = {
            "request_success_total": self.success,
            "admission_rejections_total": self.rejections,
            "prompt_tokens_by_source_total": self._by_source,
            "prompt_tokens_cached_by_source_total": self._cached_by_source,
        }
        for name, count in self._counts.items():
            if name not in by_reason:
                self._show(shown, series[name], {labels: count})
        for name, counts in by_reason.items():
            its_labels = labels[: len(series[name].labels) - 1]
            self._show(shown, series[name], {(*its_labels, reason): count for reason, count in counts.items()})
        same = {
            "time_per_output_token_seconds": "inter_token_latency_seconds",
            "max_num_generation_tokens": "request_max_num_generation_tokens",
        }
        for name in self._histograms:
            if name != "lora_adapter_load_seconds":
                self._show(shown, series[name], {labels: self._histograms[same.get(name, name)]})
        loads: dict[tuple[str, ...], Number | Histogram] = {
            (*labels, transition): histogram for transition, histogram in self._loads.items()
        }
        self._show(shown, series["lora_adapter_load_seconds"], loads)
        shown.read(series["lora_requests_info"], self._lora_requests)
        shown.read(series["cache_config_info"], self._cache_config)
        shown.read(series["lora_adapter_loaded"], lambda: self._resident(labels))

    @staticmethod
    def _show(shown: Exporter, series: Series, values: Mapping[tuple[str, ...], Number | Histogram]) -> None:
        samples: list[Sample] = list(values.items())
        shown.read(series, lambda: samples)

    def _by_reason(self, labels: tuple[str, ...]) -> Iterable[Sample]:
        state = self._read()
        deferred = min(state.num_deferred, state.num_waiting)
        return [((*labels, "capacity"), state.num_waiting - deferred), ((*labels, "deferred"), deferred)]

    def _lora_requests(self) -> Iterable[Sample]:
        return list(self._adapters_known.items())

    def _cache_config(self) -> Iterable[Sample]:
        cache = self.cache
        known = {
            "block_size": cache.block_size,
            "cache_dtype": cache.dtype,
            "effective_attention_block_size": cache.block_size,
            "enable_prefix_caching": cache.prefix_caching,
            "engine": self._engine,
            "gpu_memory_utilization": cache.memory_share,
            "kv_cache_max_concurrency": cache.pool_tokens / max(1, cache.max_model_len),
            "kv_cache_size_tokens": cache.pool_tokens + cache.block_size,
            "num_gpu_blocks": cache.num_blocks + 1,  # vLLM counts one that it never gives out
        }
        return [(tuple(str(known.get(label, usual)) for label, usual in CACHE_CONFIG.items()), 1)]

    def _resident(self, labels: tuple[str, ...]) -> Iterable[Sample]:
        for name, (on_gpu, on_host) in list(self._read().adapters.items()):
            if on_gpu or on_host:
                yield (*labels, name, "gpu" if on_gpu else "cpu", "false"), 1

    def _show_sglang(self, shown: Exporter) -> None:
        series, counts, labels = self._sglang, self._counts, (self._model,)

        def value(name: str, read: Callable[[], float], *more: str) -> None:
            shown.read(series[name], lambda: [((*labels, *more), read())])

        of_scheduler = ("unified", "0", "0")
        value("num_running_reqs", lambda: self._read().num_running, *of_scheduler)
        value("num_queue_reqs", lambda: self._read().num_waiting, *of_scheduler)
        value("num_used_tokens", lambda: round(self._read().kv_usage * self.cache.pool_tokens), *of_scheduler)
        value("max_total_num_tokens", lambda: self.cache.pool_tokens, *of_scheduler)
        value("token_usage", lambda: self._read().kv_usage, *of_scheduler)
        tokens = self._made_tokens
        value("gen_throughput", Throughput(lambda: tokens.value).per_second, *of_scheduler)
        value("page_size", lambda: self.cache.block_size, *of_scheduler)
        value("num_pages", lambda: self.cache.num_blocks, *of_scheduler)
        value("cache_hit_rate", self._hit_rate, *of_scheduler)
        value("prompt_tokens_total", lambda: counts["prompt_tokens_total"].value)
        value("cached_tokens_total", lambda: counts["prompt_tokens_cached_total"].value, "device")
        value("generation_tokens_total", lambda: counts["generation_tokens_total"].value)
        value("num_requests_total", lambda: self.success["stop"].value + self.success["length"].value)
        value("num_aborted_requests_total", lambda: self.num_aborted.value)
        for name, histogram in self._sglang_histograms.items():
            self._show(shown, series[name], {labels: histogram})

    def _hit_rate(self) -> float:
        queries = self._counts["prefix_cache_queries_total"].value
        return self._counts["prefix_cache_hits_total"].value / queries if queries else 0.0
