"""What a scheduler counts and shows. Times are device seconds unless the name says cpu."""

from collections.abc import Callable, Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lorrery.chassis.faults import LOAD_KINDS, WORKER_KINDS
from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.core.replica import Replica
from lorrery.scheduler.watch import Loss
from lorrery.vocabulary.finish_reason import FinishReason
from lorrery.vocabulary.units import PS_PER_SECOND

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
CPU_BUCKETS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.01, 0.1)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKEN_BUCKETS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


class AttachedWorker(Protocol):
    """What the gauges read of a worker."""

    worker_id: str

    @property
    def replica(self) -> Replica:
        """Its batch and queue."""
        ...

    @property
    def max_total_token_num(self) -> int:
        """Its KV pool."""
        ...

    @property
    def draining(self) -> bool:
        """Whether it is given nothing new."""
        ...


class SchedulerMetrics:
    """All series of one scheduler; `workers` and the `num_*` are read at each scrape."""

    def __init__(
        self,
        registry: CollectorRegistry,
        workers: Callable[[], list[AttachedWorker]],
        num_unplaced: Callable[[], int],
        num_held: Callable[[], int],
        fairness: Callable[[], float],
        num_live: Callable[[], int],
        num_routers: Callable[[], int],
    ) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"lorrery_scheduler_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"lorrery_scheduler_{name}", text, labels, registry=registry, buckets=buckets)

        self.requests = counter("requests_total", "Requests that ended, by outcome.", ("outcome",))
        self.orphaned = counter(
            "orphaned_requests_total",
            "Requests withdrawn since their router's stream ended; one that it resumes counts once, at its end.",
        )
        self.plans = counter("plans_total", "Plans sent to workers.")
        self.late_interrupts = counter(
            "late_interrupts_total", "Arrivals and cancels that took effect later than at the first possible boundary."
        )
        self.moved = counter(
            "moved_requests_total", "Requests that moved to another worker while they waited, to start there earlier."
        )
        self.requeued = counter("requeued_sequences_total", "Sequences queued again after a worker was lost or left.")
        self.preemptions = counter("preemptions_total", "Sequences that lost their place to others and wait again.")
        self.workers_lost = counter("workers_lost_total", "Workers that went without draining.")
        self.faults = counter(
            "faults_total", "Faults on request that have happened to loads and workers, by kind.", ("kind",)
        )
        for kind in (*sorted(LOAD_KINDS), *sorted(WORKER_KINDS)):
            self.faults.labels(kind)
        self.workers_given_up = counter(
            "workers_given_up_total", "Workers whose stream the scheduler ended, by reason.", ("reason",)
        )
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of admitted requests.")
        self.output_tokens = counter("output_tokens_total", "Tokens that workers produced.")
        self.prefix_queries = counter("prefix_cache_queries_total", "Input tokens looked up in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hits_total", "Input tokens found in the prefix cache.")
        self.prefix_evictions = counter("prefix_cache_evictions_total", "Blocks that a prefix cache gave up.")
        self.adapter_loads = counter("adapter_loads_total", "Adapters loaded into a worker's device memory.")
        self.gap_seconds = counter("gap_seconds_total", "Time in which a worker with a plan stood still.")
        self.queue_seconds = histogram("queue_seconds", "From arrival to first admission.", WAIT_BUCKETS)
        self.ttft_seconds = histogram(
            "time_to_first_token_seconds", "From arrival to the end of the prefill.", WAIT_BUCKETS
        )
        self._step_seconds = histogram("step_seconds", "Duration of a step, by kind.", STEP_BUCKETS, ("kind",))
        self._prefill_seconds = self._step_seconds.labels("prefill")
        self._decode_seconds = self._step_seconds.labels("decode")
        self.batch_size = histogram("batch_size", "Sequences that got a token in a step.", SIZE_BUCKETS)
        self.batch_tokens = histogram("batch_tokens", "Tokens computed in a step.", TOKEN_BUCKETS)
        self.plan_seconds = histogram("plan_cpu_seconds", "CPU time of one planning.", CPU_BUCKETS)
        self.commit_seconds = histogram("commit_cpu_seconds", "CPU time of one commit.", CPU_BUCKETS)
        finishes = (reason.word for reason in FinishReason if reason)
        for outcome in (*finishes, "cancelled", "dropped", "refused", "failed"):
            self.requests.labels(outcome)
        for loss in Loss:
            self.workers_given_up.labels(loss)
        registry.register(_Gauges(workers, num_unplaced, num_held, fairness, num_live, num_routers))

    def step(self, plan: Plan, step_ps: int, num_tokens_out: int) -> None:
        """Note one step of a plan."""
        seconds = self._decode_seconds if plan.decode else self._prefill_seconds
        seconds.observe(step_ps / PS_PER_SECOND)
        num_decodes = num_tokens_out - sum(chunk.samples for chunk in plan.prefills) if plan.decode else 0
        self.batch_tokens.observe(num_decodes + sum(chunk.new_tokens for chunk in plan.prefills))
        self.batch_size.observe(num_tokens_out)
        self.output_tokens.inc(num_tokens_out)

    def gap(self, gap_ps: int) -> None:
        """Note how long a worker stood still before a step."""
        self.gap_seconds.inc(gap_ps / PS_PER_SECOND)

    def admitted(self, queue_ps: int, prompt_tokens: int) -> None:
        """Note a request's first admission."""
        self.queue_seconds.observe(queue_ps / PS_PER_SECOND)
        self.prompt_tokens.inc(prompt_tokens)

    def prefix_looked_up(self, input_tokens: int, cached_tokens: int) -> None:
        """Note an admission's look-up in the prefix cache."""
        self.prefix_queries.inc(input_tokens)
        self.prefix_hits.inc(cached_tokens)

    def first_token(self, ttft_ps: int) -> None:
        """Note a request's first token."""
        self.ttft_seconds.observe(ttft_ps / PS_PER_SECOND)

    def cancelled(self, *, orphaned: bool) -> None:
        """Note a request that was withdrawn: by its client, or because its router's stream has ended."""
        (self.orphaned if orphaned else self.requests.labels("cancelled")).inc()

    def finished(self, reason: FinishReason) -> None:
        """Note a request that ended by itself."""
        self.requests.labels(reason.word).inc()


class _Gauges(Collector):
    """Reads the present state when Prometheus asks, so that no step pays for it."""

    def __init__(
        self,
        workers: Callable[[], list[AttachedWorker]],
        num_unplaced: Callable[[], int],
        num_held: Callable[[], int],
        fairness: Callable[[], float],
        num_live: Callable[[], int],
        num_routers: Callable[[], int],
    ) -> None:
        self._workers = workers
        self._num_unplaced = num_unplaced
        self._num_held = num_held
        self._fairness = fairness
        self._num_live = num_live
        self._num_routers = num_routers

    def collect(self) -> Iterable[Metric]:
        workers = self._workers()

        def gauge(name: str, text: str, value: float) -> Metric:
            return GaugeMetricFamily(f"lorrery_scheduler_{name}", text, value)

        def per_worker(name: str, text: str, read: Callable[[AttachedWorker], float]) -> Metric:
            family = GaugeMetricFamily(f"lorrery_scheduler_{name}", text, labels=["worker"])
            for worker in workers:
                family.add_metric([worker.worker_id], read(worker))
            return family

        states = GaugeMetricFamily("lorrery_scheduler_workers", "Attached workers, by state.", labels=["state"])
        states.add_metric(["ready"], sum(not worker.draining for worker in workers))
        states.add_metric(["draining"], sum(worker.draining for worker in workers))
        yield states
        yield gauge("routers", "Connected routers.", self._num_routers())
        yield gauge("in_flight_requests", "Requests that have not ended.", self._num_live())
        yield gauge("unplaced_requests", "Requests that wait for a worker to attach.", self._num_unplaced())
        yield gauge(
            "tenant_fairness_ratio",
            "Jain's index of the tokens that tenants were served in a minute.",
            self._fairness(),
        )
        yield gauge("held_requests", "Requests that wait until their key runs fewer others.", self._num_held())
        waiting = sum(worker.replica.num_waiting for worker in workers) + self._num_unplaced() + self._num_held()
        yield gauge("waiting_requests", "Requests that wait for admission, on all workers and for one.", waiting)
        yield gauge("running_requests", "Sequences in a batch.", sum(worker.replica.num_running for worker in workers))
        pins = sum(worker.replica.running.adapter_pins for worker in workers)
        yield gauge("adapter_pins", "Running sequences that pin an adapter.", pins)
        yield per_worker("worker_running_sequences", "Sequences in the batch.", lambda w: w.replica.num_running)
        yield per_worker("worker_waiting_sequences", "Sequences in the queue.", lambda w: w.replica.num_waiting)
        yield per_worker("worker_kv_tokens", "KV tokens that sequences hold.", lambda w: w.replica.kv_tokens)
        yield per_worker("worker_kv_pool_tokens", "Size of the KV pool.", lambda w: w.max_total_token_num)
        blocks = GaugeMetricFamily(
            "lorrery_scheduler_worker_kv_blocks", "Blocks of a paged KV pool.", labels=["worker", "state"]
        )
        for worker in workers:
            use = worker.replica.memory.block_use(worker.replica.running)
            if use is not None:
                blocks.add_metric([worker.worker_id, "used"], use.used)
                blocks.add_metric([worker.worker_id, "cached"], use.cached)
                blocks.add_metric([worker.worker_id, "free"], use.free)
        yield blocks
        yield per_worker(
            "worker_resident_adapters", "Adapters in the device's memory.", lambda w: len(w.replica.resident_adapters)
        )
