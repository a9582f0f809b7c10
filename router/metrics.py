"""What a router counts. Times are device seconds unless the name says wall.

The client library's counters cost one to two microseconds a time, which is a tenth of all that the router spends on a
message. What changes per message is therefore counted in plain integers and read out when somebody asks.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lorrery.chassis.faults import REQUEST_KINDS
from lorrery.chassis.histogram import CheapHistogram

OUTCOMES = (
    "ok",
    "cancelled",
    "aborted",
    "deadline",
    "invalid",
    "not_found",
    "overloaded",
    "over_quota",
    "unattainable",
    "rank_over_limit",
    "unauthenticated",
    "denied",
    "unavailable",
    "fault",
    "failed",
)

# vLLM's buckets, so that dashboards made for it fit, and more where these leave no percentile: vLLM's first bound
# for TPOT, 10 ms, is above a whole decode step of an H100; a prefill takes it 0.1 to 0.25 s, which is one bucket.
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TPOT_BUCKETS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_E2E_BUCKETS = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS_PER_MESSAGE_BUCKETS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0, 4096.0)
_LAG_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class RouterMetrics(Collector):
    """All of them; register once per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.messages = 0
        self.dropped_tokens = 0
        self.ttft = CheapHistogram(
            "lorrery_router_time_to_first_token_seconds",
            "From the arrival of a request to the writing of its first token; device seconds.",
            _TTFT_BUCKETS,
        )
        self.tpot = CheapHistogram(
            "lorrery_router_time_per_output_token_seconds",
            "(E2E - TTFT) / (output tokens - 1) of a request; device seconds.",
            _TPOT_BUCKETS,
        )
        self.itl = CheapHistogram(
            "lorrery_router_inter_token_latency_seconds",
            "Gap between two tokens of a stream, a message's gap shared by its tokens; device seconds.",
            _TPOT_BUCKETS,
        )
        self.e2e = CheapHistogram(
            "lorrery_router_e2e_request_latency_seconds",
            "From the arrival of a request to the writing of its last message; device seconds.",
            _E2E_BUCKETS,
        )
        self.tokens_per_message = CheapHistogram(
            "lorrery_router_tokens_per_message_tokens",
            "Tokens in one message to a client; above 1 where the router coalesces.",
            _TOKENS_PER_MESSAGE_BUCKETS,
        )
        self.lag = CheapHistogram(
            "lorrery_router_lag_wall_seconds",
            "How late a frame of tokens met this router's event loop; wall seconds.",
            _LAG_BUCKETS,
        )
        requests = Counter(
            "lorrery_router_requests_total",
            "Generate calls that have ended, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self._outcomes = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        self.resumed = Counter(
            "lorrery_router_resumed_total", "Requests submitted again after their shard was lost.", registry=registry
        )
        self.slow_readers = Counter(
            "lorrery_router_slow_readers_total",
            "Streams cut because their reader left max_pending_tokens waiting or took nothing for too long.",
            registry=registry,
        )
        self.faults = Counter(
            "lorrery_router_faults_total",
            "Faults on request that requests have met, by kind.",
            ["kind"],
            registry=registry,
        )
        for kind in sorted(REQUEST_KINDS):
            self.faults.labels(kind)
        self._open_handlers = Gauge(
            "lorrery_router_open_handlers", "Generate calls that have not returned.", registry=registry
        )
        self._in_flight = Gauge(
            "lorrery_router_in_flight_requests", "Requests that a shard is working on.", registry=registry
        )
        self._waiting = Gauge(
            "lorrery_router_waiting_for_shard_requests", "Requests that wait for a shard to connect.", registry=registry
        )
        self._connected = Gauge(
            "lorrery_router_shard_connected",
            "1 while the Route stream to a scheduler is up.",
            ["shard"],
            registry=registry,
        )
        registry.register(self)

    def watch(
        self,
        *,
        open_handlers: Callable[[], float],
        in_flight: Callable[[], float],
        waiting: Callable[[], float],
    ) -> None:
        """Say where the gauges read from."""
        self._open_handlers.set_function(open_handlers)
        self._in_flight.set_function(in_flight)
        self._waiting.set_function(waiting)

    def shard_connected(self, address: str, connected: bool) -> None:
        """Tell that a Route stream is up or down."""
        self._connected.labels(address).set(connected)

    def request_ended(self, outcome: str) -> None:
        """Count one Generate call; `outcome` is one of `OUTCOMES`."""
        self._outcomes[outcome].inc()

    def collect(self) -> Iterator[Metric]:
        """Yield what is counted in plain integers."""
        for name, help_text, value in (
            ("lorrery_router_prompt_tokens_total", "Prompt tokens of accepted requests.", self.prompt_tokens),
            ("lorrery_router_output_tokens_total", "Tokens written to clients.", self.output_tokens),
            ("lorrery_router_messages_total", "Messages written to clients.", self.messages),
            (
                "lorrery_router_dropped_tokens_total",
                "Tokens dropped because nobody waits for them any more, as after a cancellation.",
                self.dropped_tokens,
            ),
        ):
            yield CounterMetricFamily(name, help_text, value=value)
        for histogram in (self.ttft, self.tpot, self.itl, self.e2e, self.tokens_per_message, self.lag):
            yield histogram.family()
