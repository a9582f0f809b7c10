"""docs/metrics.md: every series of every service, from the tables that the services export by."""

from collections.abc import Iterable, Sequence

from lab.reference.pages import DO_NOT_EDIT, paragraph, table
from lorrery.loadgen.metrics import TABLE as LOADGEN
from lorrery.router.http.server import TABLE as HTTP
from lorrery.router.metrics import TABLE as ROUTER
from lorrery.scheduler.subscribers.series import TABLE as SCHEDULER
from lorrery.service.telemetry.metrics import TABLE as PROCESS
from lorrery.service.telemetry.series import Series
from lorrery.service.telemetry.tracing import SPANS
from lorrery.worker.metrics import CONSTANT_LABELS
from lorrery.worker.metrics import TABLE as WORKER

INTRODUCTION = f"""# Metrics

{DO_NOT_EDIT.format("the services' metrics and lab/reference/metrics_page.py")}

Every process answers `GET /metrics`: the router on port 9101 with `deploy/cluster.toml`, the scheduler on 9102, the
workers of `lorrery up` from 9103 on, in containers all of them on 9100, `lorrery load` where `--metrics HOST:PORT`
says. `deploy/prometheus/prometheus.yml` scrapes them, the dashboards in `deploy/grafana/` show them. Workers and the
router's HTTP edge have vLLM's series too ([gateways.md](gateways.md#metrics-under-engines-names)); the edge's
`/metrics` has the router's own as well, so let Prometheus scrape one of the two.

**Units.** *Device seconds* are time on the modelled GPU; *wall seconds* are real time. With `time_scale = 2` a device
second takes two wall seconds. `rate()` is always per wall second. Ratios are not exported: each is a quotient of two
metrics here, so that both can first be summed over workers.

**Percentiles** from `histogram_quantile` are no more precise than a bucket's width; the mean, `rate(X_sum) /
rate(X_count)`, is exact. All histograms are classic ones; Prometheus 3 stores them as native ones if the scrape
configuration has `convert_classic_histograms_to_nhcb: true`.

**Labels** are bounded: every value of `outcome`, `kind`, `reason`, `tier`, `level` and `state` exists from the start
with 0, unless a line below says otherwise. `worker` is always the worker's name (`worker.name`), so that series of the
scheduler and of the worker can be joined; a scheduler's series for a worker end when the worker leaves.

**Adapters and tenants.** `adapter` and `tenant` take the `metrics.max_adapters` and `metrics.max_tenants` names with
the most traffic in this process (20 each), and `other` for the rest. `adapter="base"` is the base model;
`tenant="none"` are requests that name no tenant; an adapter that really has such a name is shown in quotes, `'base'`.
Names known in advance have a place from the start, with 0, as long as places are free; a name loses its place to
another with more than twice its requests. An event counts for `other` if its name is not shown at the time, so every
counter only grows, and the rates over all labels sum to the total rate.

| question | expression |
|---|---|
| TTFT, p99 | `histogram_quantile(0.99, sum by (le) (rate(lorrery_router_time_to_first_token_seconds_bucket[1m])))` |
| TTFT p99 by adapter | `histogram_quantile(0.99, sum by (le, adapter) (rate(lorrery_router_adapter_time_to_first_token_seconds_bucket[1m])))` |
| share of requests that failed | `sum(rate(lorrery_router_requests_total{{outcome!~"ok\\|cancelled\\|aborted"}}[1m])) / sum(rate(lorrery_router_requests_total[1m]))` |
| refused requests by tenant | `sum by (tenant, outcome) (rate(lorrery_router_tenant_requests_total{{outcome=~"overloaded\\|over_quota\\|unattainable"}}[1m]))` |
| mean wait for admission by tenant | `sum by (tenant) (rate(lorrery_scheduler_tenant_queue_seconds_sum[1m])) / sum by (tenant) (rate(lorrery_scheduler_tenant_queue_seconds_count[1m]))` |
| adapters that thrash | `topk(5, sum by (adapter) (rate(lorrery_scheduler_adapter_thrash_total[5m])))` |
| how long an adapter stays on a GPU until it is evicted | `sum by (adapter) (rate(lorrery_scheduler_adapter_resident_seconds_total[5m])) / sum by (adapter) (rate(lorrery_scheduler_evictions_by_adapter_total[5m]))` |
| share of loads from disk | `sum(rate(lorrery_scheduler_adapter_loads_total{{tier="disk"}}[5m])) / sum(rate(lorrery_scheduler_adapter_loads_total[5m]))` |
| KV use | `lorrery_scheduler_worker_kv_tokens / lorrery_scheduler_worker_kv_pool_tokens` |
| KV use with `memory = "paged"`, shared blocks counted once | `lorrery_scheduler_worker_kv_blocks{{state="used"}} / ignoring(state) sum without (state) (lorrery_scheduler_worker_kv_blocks)` |
| running sequences by GPU | `sum by (gpu) (lorrery_scheduler_worker_running_sequences * on (worker) group_left (gpu) lorrery_worker_info)` |
| prefix cache hit ratio | `rate(lorrery_scheduler_prefix_cache_hits_total[1m]) / rate(lorrery_scheduler_prefix_cache_queries_total[1m])` |
| how far a worker is behind the modelled pace | `rate(lorrery_worker_step_actual_seconds_sum[1m]) / rate(lorrery_worker_step_modelled_seconds_sum[1m]) - 1` |
| step time by component | `sum by (kind) (rate(lorrery_worker_step_part_seconds_total[1m])) / ignoring(kind) group_left sum(rate(lorrery_worker_step_modelled_seconds_sum[1m]))` |
| use of peak FLOPS while a batch runs | `rate(lorrery_worker_flops_total[1m]) / rate(lorrery_worker_step_modelled_seconds_sum[1m]) / lorrery_worker_peak_flops_per_second` |
| use of peak memory bandwidth while a batch runs | `rate(lorrery_worker_memory_bytes_total[1m]) / rate(lorrery_worker_step_modelled_seconds_sum[1m]) / lorrery_worker_peak_memory_bytes_per_second` |
"""  # noqa: E501  expressions to copy

SECTIONS: tuple[tuple[str, str, Sequence[Series], tuple[str, ...]], ...] = (
    ("Router", "", ROUTER, ()),
    ("The router's HTTP edge", "", HTTP, ()),
    ("Scheduler", "Gauges are computed at each scrape, so that steps cost nothing for them.", SCHEDULER, ()),
    (
        "Worker",
        (
            "Steps are counted in batches: while a plan runs, the figures for steps, running sequences and KV tokens "
            "(also under other engines' names) may be `worker.heartbeat_seconds` old. When a request ends, all are "
            "current."
        ),
        WORKER,
        CONSTANT_LABELS,
    ),
    (
        "Load generator",
        """Exported while it runs, with `--metrics`. Latencies count from the *intended* send time, so that the client's
own delay is included. Warm-up requests are included. Compose's Prometheus scrapes it while it runs.""",
        LOADGEN,
        (),
    ),
    ("Every process", "The load generator has no `lorrery_service_state`.", (*PROCESS, SPANS), ()),
)


def metrics_page() -> str:
    """Return the page."""
    lines = [INTRODUCTION]
    for title, text, series, constant in SECTIONS:
        lines += [f"## {title}", "", *(paragraph(text) if text else [])]
        lines += table(("name", "type", "labels", "unit", "meaning"), _rows(series, constant))
    return "\n".join(lines).rstrip() + "\n"


def _rows(series: Iterable[Series], constant: tuple[str, ...]) -> Iterable[Sequence[str]]:
    for one in series:
        meaning = f"{one.help} {one.more}".strip()
        yield f"`{one.name}`", one.type, ", ".join((*one.labels, *constant)), one.unit, meaning
