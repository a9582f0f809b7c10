"""Shows the figures of the benchmarks of live services, and of the core, as tables in a terminal."""

from collections.abc import Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lab.bench.core import AIM_BATCH, AIM_US, CoreCost
from lab.bench.deep_queues import AIM_MS, LoopHold
from lab.bench.failure_site import Failure
from lab.bench.fidelity import Fidelity
from lab.bench.last_hop import BARE, CLUSTER, LastHop
from lab.bench.marks import meets, ms, notes_below, percent
from lab.bench.metrics_cost import AIM_RATIO, SERVICES, MetricsCost
from lab.bench.overload import Overload
from lab.bench.step_cpu import Row as StepCpu
from lab.bench.tracing_cost import AIM_RATIO as TRACING_AIM
from lab.bench.tracing_cost import ALL, RATIOS, TracingCost

ROUTER_AIM, INNER_AIM, EFFICIENCY_AIM = 1.25, 0.15, 0.8


def fidelity(result: Fidelity) -> Group:
    """Show the pace and the conditions of the run."""
    table = Table(title="Fidelity: the wall clock at the client against the model", show_header=False)
    verdict = "[red]void[/]" if result.void else meets(abs(result.error_ratio) <= result.aim_ratio)
    load = (
        f"{result.window_seconds:.0f} s, {result.num_steps:.0f} steps ({result.num_decode_steps:.0f} decode),"
        f" batch {result.mean_batch:.1f}, {result.num_requests} requests ended"
    )
    difference = (
        f"[bold]{result.error_ratio:+.3%}[/] ({result.least_error_ratio:+.3%} to {result.most_error_ratio:+.3%}"
        f" by where the window is cut); aim: within {result.aim_ratio:.0%}, {verdict}"
    )
    rows = [
        ("load", load),
        ("mean step, wall clock", f"{result.wall_step_seconds * 1e3:.4f} ms"),
        ("mean step, modelled", f"{result.modelled_step_seconds * 1e3:.4f} ms"),
        ("difference", difference),
        ("difference without gaps", f"{result.error_ratio - result.gap_ratio:+.3%}"),
        (
            "gaps (worker stood still)",
            f"{result.num_gaps}, {result.gap_ratio:.3%} of the time; {result.late_interrupts} late interrupts",
        ),
        ("worker lag p50, p99", ms(result.worker_lag_seconds)),
        ("router lag p50, p99", ms(result.router_lag_seconds)),
        ("probe's token gaps p50, p99, most", ms(result.client_gap_seconds)),
        (
            "cores used",
            ", ".join(f"{name} {usage.cpu_share:.0%}" for name, usage in result.usage.items()),
        ),
        (
            "waited for a core",
            ", ".join(f"{name} {percent(usage.run_queue_delay_ratio)}" for name, usage in result.usage.items()),
        ),
    ]
    for row in rows:
        table.add_row(*row)
    return Group(table, *notes_below(result.void, result.run_queue_delay_ratio))


def last_hop(results: Iterable[LastHop]) -> Group:
    """Show the cost per token by process, the cluster next to the bare stream."""
    results = list(results)
    table = Table(title="Last hop: CPU per token, beside a bare gRPC stream in the same run")
    table.add_column("")
    for result in results:
        table.add_column(f"batch {result.batch}", justify="right")
    table.add_column("aim", justify="right")

    def row(name: str, cells: Iterable[str], aim: str = "") -> None:
        table.add_row(name, *cells, aim)

    row("time between two tokens, ms", (f"{r.step_seconds * 1e3:.2f}" for r in results))
    row("tokens/s, cluster", (f"{r.tokens_per_second:,.0f}" for r in results))
    row("tokens/s, bare / cluster", (f"{r.pace_ratio:.3f}" for r in results), "1")
    row("tokens per message", (f"{r.tokens_per_message:.3f}" for r in results))
    table.add_section()
    for name in CLUSTER:
        row(f"{name}, us/token", (f"{r.us_per_token[name]:.2f}" for r in results))
    for name in BARE:
        row(f"bare {name}, us/token", (f"{r.bare_us_per_token[name]:.2f}" for r in results))
    for name in ("worker", "scheduler"):
        row(f"{name}, us/step", (f"{r.us_per_step[name]:.0f}" for r in results))
    table.add_section()
    row("router / bare server, per message", (f"{r.router_ratio:.2f}" for r in results), f"<= {ROUTER_AIM}")
    row("load generator / bare client, per message", (f"{r.client_ratio:.2f}" for r in results))
    row(
        "worker and scheduler, share of all",
        (f"{r.inner_share:.1%}" for r in results),
        f"<= {INNER_AIM:.0%} at 256",
    )
    row(
        "tokens per CPU second of router and client / bare",
        (f"{r.efficiency_ratio:.2f}" for r in results),
        f">= {EFFICIENCY_AIM}",
    )
    table.add_section()
    row("repetitions (void)", (f"{r.repetitions} ({r.num_void})" for r in results))
    row("waited for a core, at most", (percent(r.run_queue_delay_ratio) for r in results))
    void = "; ".join(f"batch {r.batch}: {r.void}" for r in results if r.void)
    delays = [r.run_queue_delay_ratio for r in results if r.run_queue_delay_ratio is not None]
    return Group(table, *notes_below(void, max(delays, default=None)))


def metrics_cost(result: MetricsCost) -> Group:
    """Show what counting and scraping add to each process."""
    table = Table(title="Metrics: CPU with all of them, scraped, beside the same without any")
    table.add_column("")
    for name in ("with, us", "without, us", "added", "of each repetition", "series", "aim"):
        table.add_column(name, justify="right")
    for name in SERVICES:
        added, has_aim = result.overhead_ratio[name], name in result.series
        table.add_row(
            f"{name}, per {'message' if name == 'router' else 'token'}",
            f"{result.us[name]:.2f}",
            f"{result.uncounted_us[name]:.2f}",
            f"{added:+.1%}",
            " ".join(f"{value:+.1%}" for value in result.overheads[name]),
            f"{result.series[name]:,}" if has_aim else "",
            f"<= {AIM_RATIO:.0%}, {meets(added <= AIM_RATIO)}" if has_aim else "",
        )
    pace = Text(f"{result.tokens_per_second:,.0f} tokens/s; with / without {result.pace_ratio:.3f}")
    return Group(table, pace, *notes_below(result.void, 0.0))


def tracing_cost(result: TracingCost) -> Group:
    """Show what tracing adds to each process."""
    table = Table(title="Tracing: CPU beside that of the same cluster with tracing off")
    table.add_column("requests traced")
    table.add_column("")
    for name in ("off, us", "added", "of each repetition", "aim"):
        table.add_column(name, justify="right")
    for ratio, by_name in result.overhead_ratio.items():
        for name, added in by_name.items():
            table.add_row(
                f"{ratio:.0%}",
                f"{name}, per {'message' if name == 'router' else 'token'}",
                f"{result.off_us[name]:.2f}",
                f"{added:+.1%}",
                " ".join(f"{value:+.1%}" for value in result.overheads[ratio][name]),
                f"<= {TRACING_AIM:.0%}, {meets(added <= TRACING_AIM)}" if (ratio, name) == (RATIOS[0], ALL) else "",
            )
    pace = Text(f"{result.tokens_per_second:,.0f} tokens/s; {result.num_batches} batches of spans")
    return Group(table, pace, *notes_below(result.void, 0.0))


def step_cpu(rows: Iterable[StepCpu]) -> Table:
    """Show the cost of a step in worker and scheduler, next to bare streams."""
    table = Table(title="CPU of a step, beside bare gRPC streams with as many messages in the same run")
    table.add_column("process")
    for name in ("GPUs x batch", "steps/s", "us/step", "bare, us", "waking, us", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.process,
            f"{row.gpus} x {row.batch}",
            f"{row.steps_per_second:,.0f}",
            f"{row.step_us:.0f}",
            f"{row.bare_us:.0f}",
            f"{row.wake_us:.0f}",
            f"{row.ratio:.2f}",
        )
    return table


def deep_queues(rows: Iterable[LoopHold]) -> Table:
    """Show how long the scheduler's loop was blocked."""
    table = Table(title=f"Deep queues: longest time between two turns of the scheduler's loop (aim: {AIM_MS:g} ms)")
    table.add_column("event", no_wrap=True)
    for name in ("waiting", "longest, ms", "of that CPU, ms", "in all, ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        table.add_row(
            r.what, f"{r.num_waiting:,}", f"{r.longest_ms:.0f}", f"{r.longest_cpu_ms:.0f}", f"{r.whole_ms:.0f}"
        )
    return table


def core(rows: Iterable[CoreCost]) -> Table:
    """Show the core's cost per step."""
    table = Table(
        title=f"Core: CPU of one plan and one commit, us (aim at batch {AIM_BATCH}: live mean <= {AIM_US:g} us)"
    )
    numbers = ("batch", "waiting", "p50", "p99", "decode", "prefill", "admitted", "live mean", "loop", "p50/loop")
    for name in ("policy", "pressure"):
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for r in rows:
        table.add_row(
            r.policy,
            r.pressure,
            str(r.batch),
            f"{r.waiting:,}",
            f"{r.p50_us:.1f}",
            f"{r.p99_us:.0f}",
            "-" if r.decode_p50_us is None else f"{r.decode_p50_us:.1f}",
            "-" if r.prefill_p50_us is None else f"{r.prefill_p50_us:.0f}",
            f"{r.mean_admitted:.1f}",
            f"{r.live_mean_us:.1f}",
            f"{r.reference_p50_us:.1f}",
            f"{r.ratio:.2f}",
        )
    return table


def failures(rows: Iterable[Failure]) -> Table:
    """Show each fault's effect on streams, the counters that grew, and the logged events."""
    table = Table(title="Failures: what clients see, and for how long")
    for name in ("fault", "exact", "the others", "s", "which are", "counters that grew", "logged"):
        table.add_column(name, justify="right" if name in ("exact", "s") else "left")
    for row in rows:
        table.add_row(
            row.fault,
            f"{row.num_exact} of {row.num_streams}",
            ", ".join(f"{count} {end}" for end, count in row.ends.items()),
            f"{row.seconds:.2f}",
            row.what,
            ", ".join(f"{name.removeprefix('lorrery_')} +{value:g}" for name, value in row.counted.items()),
            ", ".join(row.logged),
        )
    return table


def overload(result: Overload) -> Group:
    """Show what clients saw at each load, and the cost of refusals."""
    table = Table(title="Overload: clients that are let in, and what the others cost")
    services = list(result.refusal_cpu_share)
    columns = ("", "requests/s", "served/s", "refused", "TTFT p50, p99, ms", "by the scheduler", "TPOT p50, p99, ms")
    for name in (*columns, *(f"{service}: cores, MB" for service in services)):
        table.add_column(name, justify="right" if name else "left")
    for phase in result.phases:
        table.add_row(
            phase.name,
            f"{phase.rate:.1f}",
            f"{phase.served_per_second:.1f}",
            f"{phase.num_refused / max(1, sum(phase.statuses.values())):.1%}",
            f"{phase.ttft_ms[0]:.0f}, {phase.ttft_ms[1]:.0f}",
            f"{phase.own_ttft_ms[0]:.0f}, {phase.own_ttft_ms[1]:.0f}",
            f"{phase.tpot_ms[0]:.1f}, {phase.tpot_ms[1]:.1f}",
            *(f"{phase.cpu_share[service]:.3f}, {phase.rss_mb[service]:.0f}" for service in services),
        )
    over = result.phases[2]
    cost = ", ".join(
        f"{service} {result.refusal_cpu_share[service]:.1%} of a core ({result.refusal_ms[service]:.2f} ms each)"
        for service in services
    )
    ratio = result.refusal_ms["router"] / result.bare_refusal_ms
    statuses = ", ".join(f"{num} {status}" for status, num in over.statuses.items())
    tenants = ", ".join(f"{tenant} {share:.0%}" for tenant, share in over.tenants.items())
    notes = (
        f"statuses under overload: {statuses}; the client used {over.cpu_share['client']:.0%} of a core",
        f"refusals took: {cost}; told when to come back: {over.retry_info_ratio:.0%}",
        f"a bare gRPC server that refuses as many calls: {result.bare_refusal_ms:.2f} ms each; the router {ratio:.2f}x",
        f"completed under overload, by tenant: {tenants}",
        f"back to normal {result.back_to_normal_seconds:.1f} s after the overload",
    )
    return Group(table, *(Text(note) for note in notes))
