"""Shows the figures of `lab.bench.sim_speed`, `sim_peers` and `sim_growth` as tables in a terminal."""

from collections.abc import Callable

from rich.console import Group
from rich.table import Table

from lab.bench.marks import meets
from lab.bench.sim_growth import COMMAND_AIM_MB, FLAT_AIM, WAITING_AIM_KB, Growth
from lab.bench.sim_speed import BARE_AIM, GROWTH_AIM, LENGTH_AIM, MEMORY_AIM_MB, RATE_AIMS, Core, SimSpeed


def sim_speed(result: SimSpeed) -> Group:
    """Show the cost of a simulated request, next to the bare loop."""
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
        aims.add_row(name, *(f"{value:.2f} {meets(value <= aim)}" for value in values), f"at most {aim:g}")
    for load in [name for name in RATE_AIMS if name in rows]:
        rates = [(rows[load].requests_per_second(core), RATE_AIMS[load].get(core)) for core in result.cores]
        aims.add_row(
            f"{load}, requests/s",
            *(f"{rate:,.0f}" if least is None else f"{rate:,.0f} {meets(rate >= least)}" for rate, least in rates),
            " and ".join(f"{least:,.0f} {core}" for core, least in RATE_AIMS[load].items()),
        )
    peak = rows["uniform"].peak_rss_mb or 0.0
    aims.add_row(
        f"uniform, peak memory with {large} requests, MB",
        f"{peak:.0f} {meets(peak <= MEMORY_AIM_MB)}",
        *[""] * (len(result.cores) - 1),
        f"at most {MEMORY_AIM_MB:g}",
    )
    hint = "" if Core.COMPILED in result.cores else "[dim]no compiled core in build/compiled; make compiled[/]"
    return Group(table, aims, _peers(result), hint)


def _peers(result: SimSpeed) -> Group:
    """Show the other simulators, and the ratio of our request rate to theirs."""
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
    """Show the cost of a simulated request as runs grow, and the command's memory."""
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
                f"{ratio:.2f} {meets(ratio <= FLAT_AIM)}" if is_last else "",
                end_section=is_last,
            )
    memory = Table(title="lorrery simulate: peak memory", box=None)
    for name in ("", "MB", "aim"):
        memory.add_column(name, justify="right" if name else "left", no_wrap=True)
    for number, (name, peak) in enumerate(result.command_peak_rss_mb.items()):
        has_aim = number < 2  # the others serve to compute the memory of one more request
        memory.add_row(
            name,
            f"{peak:.0f} {meets(peak <= COMMAND_AIM_MB) if has_aim else ''}",
            f"at most {COMMAND_AIM_MB:g}" if has_aim else "",
        )
    memory.add_row(
        "one more request that waits, KB",
        f"{result.waiting_kb:.2f} {meets(result.waiting_kb <= WAITING_AIM_KB)}",
        f"at most {WAITING_AIM_KB:g}",
    )
    return Group(table, memory)
