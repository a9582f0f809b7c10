"""A run's figures as tables; a narrow terminal shows fewer columns, and names the missing ones."""

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lorrery.loadgen.report import LoadReport, SimulationCost, scaling_lines
from lorrery.loadgen.workload.distribution import Distribution
from lorrery.view.terminal import FigureTable
from lorrery.vocabulary.adapters import FiguresByAdapter
from lorrery.vocabulary.units import PS_PER_SECOND

_BUSIEST = 6
_NOTHING = "-"


def print_report(report: LoadReport, console: Console, more: Sequence[tuple[str, str]] = ()) -> None:
    """Print requests, latencies, throughput, the busiest adapters, and warnings.

    Args:
        report: of the run.
        console: to print to.
        more: further notes, each with its label.
    """
    parts: list[RenderableType] = [Text(), _headline(report), _latencies(report), _throughput(report)]
    if len(report.summary.adapters) > 1:
        parts.append(_adapters(report))
    if report.adapters and (report.adapter_total.num_evictions or report.adapter_total.num_failed_loads):
        parts.append(_adapter_loads(report.adapters))
    parts.append(_hanging([*_notes(report), *more], style="dim"))
    warnings = [("!", line) for line in (*report.failures, *report.warnings)]
    parts.append(_hanging(warnings, style="yellow"))
    console.print(Group(*parts), highlight=False)


def _headline(report: LoadReport) -> Text:
    summary = report.summary
    text = Text()
    text.append(f"{report.options.workload}", style="bold")
    where = "simulated" if report.simulation is not None else f"at {report.options.target}"
    text.append(f" {where}: {report.cluster.model or 'model unknown'}{_workers(report)}\n")
    text.append(f"{summary.num_requests:,} requests", style="bold")
    text.append(f"  {summary.num_completed:,} completed  ")
    text.append(f"{summary.num_failed:,} failed", style="bold red" if summary.num_failed else "bold green")
    if in_stream := summary.num_failed - summary.num_failed_before_token:
        text.append(f" ({in_stream:,} of them after their first token)")
    if summary.num_interrupted:
        text.append(f"  {summary.num_interrupted:,} cut off", style="yellow")
    text.append(f"  in {summary.duration_seconds:.1f} s")
    if report.cluster.time_scale != 1:
        text.append(f" of device time ({report.wall_seconds:.1f} s on the wall, x{report.cluster.time_scale:g})")
    return text


def _workers(report: LoadReport) -> str:
    workers = report.cluster.workers
    if workers is None:
        return ""
    return ", " + (", ".join(f"{count} x {gpu}" for gpu, count in workers) or "no worker")


def _latencies(report: LoadReport) -> FigureTable:
    table = FigureTable(box=box.SIMPLE_HEAD, first_to_go=("mean", "p90"))
    table.add_column("ms", justify="left", width=30, wraps_at=17)
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, width=10)
    summary = report.summary
    rows: list[tuple[str, Distribution, bool]] = [
        ("TTFT  from the intended send", summary.from_intended.ttft_ms, True),
        ("TTFT  from the actual send", summary.from_sent.ttft_ms, False),
        ("TPOT  (E2E - TTFT) / (n - 1)", summary.tpot_ms, True),
        ("ITL   gap between tokens", summary.itl_ms, True),
        ("E2E   from the intended send", summary.from_intended.e2e_ms, True),
        ("E2E   from the actual send", summary.from_sent.e2e_ms, False),
        ("E2E / n, normalised TPOT", summary.from_intended.norm_tpot_ms, False),
    ]
    for name, values, main in rows:
        table.add_row(name, *_cells(values), style=None if main else "dim")
    return table


def _throughput(report: LoadReport) -> Text:
    summary = report.summary
    text = Text()
    text.append(f"{summary.output_tokens_per_second:,.1f} tokens/s out", style="bold")
    text.append(f"  {summary.input_tokens_per_second:,.1f} tokens/s in  {summary.requests_per_second:,.2f} requests/s")
    text.append(f"  ({summary.output_tokens:,} out, {summary.input_tokens:,} in", style="dim")
    text.append(f", {summary.cached_tokens:,} cached)" if summary.cached_tokens else ")", style="dim")
    return text


def _adapters(report: LoadReport) -> FigureTable:
    adapters = report.summary.adapters
    table = FigureTable(box=box.SIMPLE_HEAD, first_to_go=("TPOT p50", "TTFT p90", "tokens"))
    shown = adapters[:_BUSIEST]
    title = "adapter" if len(shown) == len(adapters) else f"busiest {len(shown)} of {len(adapters)}"
    table.add_column(title, justify="left", width=15, wraps_at=15)
    for name in ("requests", "failed", "tokens", "TTFT p50", "TTFT p90", "TPOT p50"):
        table.add_column(name, width=len(name) + 1)
    for adapter in shown:
        table.add_row(
            Text(adapter.adapter_id),
            f"{adapter.num_requests:,}",
            Text(f"{adapter.num_failed:,}", style="red" if adapter.num_failed else ""),
            f"{adapter.output_tokens:,}",
            _ms(adapter.ttft_ms, adapter.ttft_ms.p50),
            _ms(adapter.ttft_ms, adapter.ttft_ms.p90),
            _ms(adapter.tpot_ms, adapter.tpot_ms.p50),
        )
    return table


def _adapter_loads(adapters: FiguresByAdapter) -> FigureTable:
    table = FigureTable(box=box.SIMPLE_HEAD, first_to_go=("failed", "disk ms", "host ms"))
    shown = sorted(adapters.items(), key=lambda entry: (-entry[1].num_loads, entry[0]))[:_BUSIEST]
    title = "adapter" if len(shown) == len(adapters) else f"most loaded {len(shown)} of {len(adapters)}"
    table.add_column(title, justify="left", width=15, wraps_at=15)
    for name in ("loads", "failed", "evictions", "thrash", "host ms", "disk ms", "on GPUs s"):
        table.add_column(name, width=len(name) + 1)
    for adapter_id, figures in shown:
        counts = figures.num_loads, figures.num_failed_loads, figures.num_evictions, figures.num_thrashes
        times = figures.host_load_ps * 1000, figures.disk_load_ps * 1000, figures.resident_ps
        table.add_row(
            Text(adapter_id), *(f"{one:,}" for one in counts), *(f"{one / PS_PER_SECOND:,.1f}" for one in times)
        )
    return table


def _notes(report: LoadReport) -> list[tuple[str, str]]:
    fair = report.summary.fairness
    if fair is not None:
        served = f"{len(fair.tenants):,} tenants; Jain's index of the tokens served is {fair.jain_index:.3f}"
        return [("tenants", served), *_other_notes(report)]
    return _other_notes(report)


def _other_notes(report: LoadReport) -> list[tuple[str, str]]:
    found = [("" if index else "workload", note) for index, note in enumerate(report.workload.notes)]
    if report.adapters:
        found.append(("adapters", str(report.adapter_total)))
    if report.workload.attribution:
        found.append(("trace", report.workload.attribution))
    if report.simulation is not None:
        found.append(("simulator", _cost(report.simulation)))
        found += [("" if index else "faults", event) for index, event in enumerate(report.simulation.events)]
    if report.scaling is not None:
        found += scaling_lines(report.scaling)
    own = report.own_load
    if own is None:
        return found
    load = f"{own.cpu_share:.0%} of a core, {own.peak_cpu_share:.0%} at most"
    if own.run_queue_delay_ratio is not None:
        load += f"; waited for a core {own.run_queue_delay_ratio:.1%} of the time"
    found.append(("client", load))
    return found


def _cost(cost: SimulationCost) -> str:
    """Describe the cost of a simulation: `1,000 s in 0.5 s (x 2,000)`."""
    speed = f" (x {cost.simulated_seconds / cost.cpu_seconds:,.0f})" if cost.cpu_seconds > 0 else ""
    return (
        f"{cost.simulated_seconds:,.1f} s of device time in {cost.cpu_seconds:,.2f} s of CPU{speed};"
        f" {cost.num_steps:,} steps in {cost.num_plans:,} plans"
    )


def _hanging(lines: Sequence[tuple[str, str]], style: str) -> Table:
    """Lay out lines with their labels in a separate column, so that long lines wrap beside them."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=style, no_wrap=True)
    table.add_column(style=style, overflow="fold")
    for label, line in lines:
        table.add_row(Text(label), Text(line))
    return table


def _cells(values: Distribution) -> tuple[str, ...]:
    return tuple(_ms(values, value) for value in (values.mean, values.p50, values.p90, values.p99))


def _ms(values: Distribution, value: float) -> str:
    if not values.count:
        return _NOTHING
    return f"{value:,.1f}" if abs(value) < 1e4 else f"{value:,.0f}"
