"""The benchmarks' results as tables for a terminal.

Beside a figure stands what it is meant to be (*aim*): values that prototypes of the same shape reached, on the ratios
that survive a change of machine. An aim missed is worth a look, no failure.
"""

from collections.abc import Callable, Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.core import AIM_BATCH, AIM_US, CoreCost
from bench.deep_queues import AIM_MS, LoopHold
from bench.failure_site import Failure
from bench.fidelity import Fidelity
from bench.last_hop import BARE, CLUSTER, LastHop
from bench.live_vs_sim import LiveVsSim
from bench.metrics_cost import AIM_RATIO, SERVICES, MetricsCost
from bench.overload import Overload
from bench.sim_growth import COMMAND_AIM_MB, FLAT_AIM, WAITING_AIM_KB, Growth
from bench.sim_speed import BARE_AIM, GROWTH_AIM, LENGTH_AIM, MEMORY_AIM_MB, RATE_AIMS, Core, SimSpeed
from bench.step_cpu import Row as StepCpu
from bench.tracing_cost import AIM_RATIO as TRACING_AIM
from bench.tracing_cost import ALL, RATIOS, TracingCost

ROUTER_AIM, INNER_AIM, EFFICIENCY_AIM = 1.25, 0.15, 0.8
BUSY_DELAY = 0.1


def machine(facts: dict[str, object]) -> Text:
    """Show where the run is made."""
    return Text("  ".join(f"{name} {value}" for name, value in facts.items()), style="dim")


def fidelity(result: Fidelity) -> Group:
    """Show the pace and its surroundings."""
    table = Table(title="Fidelity: the wall clock at the client against the model", show_header=False)
    verdict = "[red]void[/]" if result.void else _meets(abs(result.error_ratio) <= result.aim_ratio)
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
        ("worker lag p50, p99", _ms(result.worker_lag_seconds)),
        ("router lag p50, p99", _ms(result.router_lag_seconds)),
        ("probe's token gaps p50, p99, most", _ms(result.client_gap_seconds)),
        (
            "cores used",
            ", ".join(f"{name} {usage.cpu_share:.0%}" for name, usage in result.usage.items()),
        ),
        (
            "waited for a core",
            ", ".join(f"{name} {_percent(usage.run_queue_delay_ratio)}" for name, usage in result.usage.items()),
        ),
    ]
    for row in rows:
        table.add_row(*row)
    return Group(table, *_notes(result.void, result.run_queue_delay_ratio))


def last_hop(results: Iterable[LastHop]) -> Group:
    """Show cost per token by process, cluster beside bare stream."""
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
    row("waited for a core, at most", (_percent(r.run_queue_delay_ratio) for r in results))
    void = "; ".join(f"batch {r.batch}: {r.void}" for r in results if r.void)
    delays = [r.run_queue_delay_ratio for r in results if r.run_queue_delay_ratio is not None]
    return Group(table, *_notes(void, max(delays, default=None)))


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
            f"<= {AIM_RATIO:.0%}, {_meets(added <= AIM_RATIO)}" if has_aim else "",
        )
    pace = Text(f"{result.tokens_per_second:,.0f} tokens/s; with / without {result.pace_ratio:.3f}")
    return Group(table, pace, *_notes(result.void, 0.0))


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
                f"<= {TRACING_AIM:.0%}, {_meets(added <= TRACING_AIM)}" if (ratio, name) == (RATIOS[0], ALL) else "",
            )
    pace = Text(f"{result.tokens_per_second:,.0f} tokens/s; {result.num_batches} batches of spans")
    return Group(table, pace, *_notes(result.void, 0.0))


def step_cpu(rows: Iterable[StepCpu]) -> Table:
    """Show what a step costs worker and scheduler, beside bare streams."""
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
    """Show how long the scheduler's loop was held."""
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


def sim_speed(result: SimSpeed) -> Group:
    """Show what a simulated request costs, beside the bare loop."""
    table = Table(title="Simulator: CPU of a whole run, beside a bare closed-form loop")
    table.add_column("load", overflow="fold")
    for name in ("requests", "core", "us/request", "requests/s", "tokens/s", "bare us/request", "ours / bare"):
        table.add_column(name, justify="left" if name == "core" else "right", no_wrap=True)
    for row in result.rows.values():
        for core in result.cores:
            bare_us, ratio = row.bare_us_per_request, row.bare_ratio(core)
            rate = row.requests_per_second(core)
            table.add_row(
                *((row.title, f"{row.num_requests:,}") if core is result.cores[0] else ("", "")),
                core,
                f"{row.us_per_request(core):.2f}",
                f"{rate:,.0f}",
                f"{rate * row.output_tokens / row.num_requests:,.0f}",
                "-" if bare_us is None else f"{bare_us:.2f}",
                "-" if ratio is None else f"{ratio:.2f}",
                end_section=core is result.cores[-1],
            )
    aims = Table(box=None)
    aims.add_column("")
    for name in (*result.cores, "aim"):
        aims.add_column(name, justify="right", no_wrap=True)
    rows, large = result.rows, f"{result.rows['uniform'].num_requests:,}"
    small = f"{result.rows['uniform small'].num_requests:,}"
    figures: list[tuple[str, Callable[[Core], float | None], float]] = [
        ("Vidur's run, ours / bare", rows["vidur"].bare_ratio, BARE_AIM),
        ("uniform, ours / bare", rows["uniform"].bare_ratio, BARE_AIM),
        (f"uniform, cost per request with {large} / {small}", result.growth_ratio, GROWTH_AIM),
        ("uniform, cost with outputs twice as long / as they are", result.length_ratio, LENGTH_AIM),
    ]
    for name, figure, aim in figures:
        values = [figure(core) or 0.0 for core in result.cores]
        aims.add_row(name, *(f"{value:.2f} {_meets(value <= aim)}" for value in values), f"at most {aim:g}")
    for load in [name for name in RATE_AIMS if name in rows]:
        rates = [(rows[load].requests_per_second(core), RATE_AIMS[load].get(core)) for core in result.cores]
        aims.add_row(
            f"{load}, requests/s",
            *(f"{rate:,.0f}" if least is None else f"{rate:,.0f} {_meets(rate >= least)}" for rate, least in rates),
            " and ".join(f"{least:,.0f} {core}" for core, least in RATE_AIMS[load].items()),
        )
    peak = rows["uniform"].peak_rss_mb or 0.0
    aims.add_row(
        f"uniform, peak memory with {large} requests, MB",
        f"{peak:.0f} {_meets(peak <= MEMORY_AIM_MB)}",
        *[""] * (len(result.cores) - 1),
        f"at most {MEMORY_AIM_MB:g}",
    )
    hint = "" if Core.COMPILED in result.cores else "[dim]no compiled core in build/compiled; make compiled[/]"
    return Group(table, aims, _peers(result), hint)


def _peers(result: SimSpeed) -> Group:
    """Show the other simulators, and how many times as many requests ours does."""
    table = Table(title="Other simulators, in turn with ours", box=None)
    table.add_column("", overflow="fold")
    for name in ("requests/s", "simulated TPOT, ms", *(f"ours / theirs, {core}" for core in result.cores)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.peers:
        rate = row.requests_per_second
        if rate is not None:
            ours = (result.rows[row.peer.load].requests_per_second(core) / rate for core in result.cores)
            table.add_row(
                row.peer.title, f"{rate:,.0f}", f"{row.mean_tpot_ms:.1f}", *(f"{ratio:.2f}" for ratio in ours)
            )
    missing = [row.peer.missing for row in result.peers if row.requests_per_second is None]
    return Group(*[table] * bool(table.row_count), *(f"[dim]{line}[/]" for line in missing))


def sim_growth(result: Growth) -> Group:
    """Show what a simulated request costs in larger and larger runs, and the command's memory."""
    table = Table(title=f"Simulator: cost of a request as runs grow, {result.core} core")
    for name in ("series", "size", "us/request", "peak MB", "largest / smallest"):
        table.add_column(name, justify="left" if name == "series" else "right", no_wrap=True)
    for name, points in result.series.items():
        ratio = result.ratio(name)
        for point in points:
            is_last = point is points[-1]
            table.add_row(
                name if point is points[0] else "",
                f"{point.size:,}",
                f"{point.cost_us:.1f}",
                f"{max(point.peak_rss_mb):.0f}",
                f"{ratio:.2f} {_meets(ratio <= FLAT_AIM)}" if is_last else "",
                end_section=is_last,
            )
    memory = Table(title="lorrery simulate: peak memory", box=None)
    for name in ("", "MB", "aim"):
        memory.add_column(name, justify="right" if name else "left", no_wrap=True)
    for number, (name, peak) in enumerate(result.command.items()):
        has_aim = number < 2  # the others are there for what one more request takes
        memory.add_row(
            name,
            f"{peak:.0f} {_meets(peak <= COMMAND_AIM_MB) if has_aim else ''}",
            f"at most {COMMAND_AIM_MB:g}" if has_aim else "",
        )
    memory.add_row(
        "one more request that waits, KB",
        f"{result.waiting_kb:.2f} {_meets(result.waiting_kb <= WAITING_AIM_KB)}",
        f"at most {WAITING_AIM_KB:g}",
    )
    return Group(table, memory)


def failures(rows: Iterable[Failure]) -> Table:
    """Show what each fault did to streams, what it counted, and what was logged."""
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


def live_vs_sim(result: LiveVsSim) -> Group:
    """Show what clients saw beside what the simulation says they would."""
    table = Table(title="Live against simulated: what a load generator sees")
    for name in (
        "",
        "live p50, ms",
        "simulated",
        "difference",
        "live p99, ms",
        "simulated",
        "difference",
        "aim of p50",
    ):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, figure in result.figures.items():
        aim = ""
        if figure.aim is not None:
            aim = f"within {figure.aim:.0%}, {_meets(abs(figure.difference) <= figure.aim)}"
        table.add_row(
            name,
            f"{figure.live_p50:.2f}",
            f"{figure.simulated_p50:.2f}",
            f"{figure.difference:+.2%}",
            f"{figure.live_p99:.2f}",
            f"{figure.simulated_p99:.2f}",
            f"{figure.p99_difference:+.2%}",
            aim,
        )
    replayed = result.replayed
    verdict = "[green]equal[/]" if result.equal else f"[red]different[/]: {replayed.differences[0]}"
    load = (
        f"{result.num_requests} requests in {result.seconds:.0f} s, at most {result.most_streams} at once; sent late by"
        f" {result.send_delay_p99_ms:.1f} ms (p99); simulated in {result.simulated_cpu_seconds:.2f} s of CPU"
    )
    journal = (
        f"the scheduler's journal, replayed: {verdict}; {replayed.num_plans} plans, {replayed.num_steps} steps,"
        f" {replayed.num_tokens} tokens; given {replayed.num_gaps} gaps, {replayed.num_late} late inputs"
    )
    notes = [load, journal, *(f"[yellow]{warning}[/]" for warning in result.warnings)]
    return Group(table, *(Text.from_markup(note) for note in notes))


def overload(result: Overload) -> Group:
    """Show what clients saw at each load, and what refusing took."""
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


def _notes(void: str, delay: float | None) -> list[Text]:
    notes = []
    if void:
        notes.append(Text(f"VOID: {void}", style="bold red"))
    if delay is None:
        notes.append(Text("this kernel does not tell how long a process waits for a core", style="yellow"))
    elif delay > BUSY_DELAY:
        notes.append(Text(f"busy machine: a process waited for a core {delay:.0%} of the time", style="yellow"))
    return notes


def _meets(met: bool) -> str:
    return "[green]met[/]" if met else "[yellow]missed[/]"


def _ms(seconds: Iterable[float | None]) -> str:
    return ", ".join("-" if value is None else f"{value * 1e3:.2f}" for value in seconds) + " ms"


def _percent(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{ratio:.1%}"
