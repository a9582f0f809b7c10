"""Whether a simulated run predicts what a load generator sees: the same settings and workload, live and simulated.

Live: scheduler, worker, router and load generator on this machine, on the wall clock at `time_scale` 1, requests sent
at the workload's times regardless of the responses (open loop). Simulated: `lorrery simulate` with the same settings
and options. Both produce the load generator's report, with times from the intended sends, so the services' own costs
are on the live side only: gRPC, the router's fan-out, late timers, other load on the machine.

The load: Poisson arrivals on one A10G with Llama-3-8B and eight LoRA adapters; 44 streams at most in a minute, and
prompts with about a quarter of a second to their first token. Longer times would hide the services' costs, shorter ones
would measure little else.

The scheduler writes its journal during the run. Its replay narrows down the difference: with the arrivals as stamped by
the scheduler, and the gaps in which the worker stood still, every plan and step must be equal.

`measure_changed` asks of such a journal what other settings would have made of its traffic, and runs the same load live
under them. Both are compared at the scheduler, where TTFT counts from its stamp, and with what clients saw.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lab.bench.cluster import CONFIG, BenchBrokenError, measured_cluster, while_alive
from lab.bench.marks import meets
from lorrery.loadgen.options import LoadOptions
from lorrery.loadgen.report import LoadReport
from lorrery.loadgen.session import load_cluster
from lorrery.loadgen.workload.summary import Summary
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.settings.cluster import load
from lorrery.service.settings.sections import TlsSettings
from lorrery.simulator.counterfactual import counterfactual
from lorrery.simulator.options import SimulationOptions
from lorrery.simulator.replay.journal import read_journal
from lorrery.simulator.replay.parts import Replayed, parts_of
from lorrery.simulator.replay.replay import replay
from lorrery.simulator.run import SimulatedRun

SETTINGS = (
    "worker.gpu=A10G",
    "scheduler.max_num_seqs=48",
    "scheduler.max_req_total_len=4096",
    "scheduler.max_num_batched_tokens=8192",
    "adapters.registry=[{id='lora', rank=16, count=8}]",
    "adapters.max_loras=8",
)
RATE = 2.25
INPUT_RANGE, OUTPUT_RANGE = (250, 850), (50, 250)
MOST_STREAMS = 64
LEAST_TTFT_MS = 200.0
TTFT_AIM, TPOT_AIM, E2E_AIM = 0.05, 0.02, 0.02
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One latency, in ms: p50 and p99 of both sides.

    Attributes:
        aim: how far the simulated p50 may be from the live one; None: no aim.
    """

    live_p50: float
    simulated_p50: float
    live_p99: float
    simulated_p99: float
    aim: float | None = None

    @property
    def difference(self) -> float:
        """Simulated / live - 1, of p50."""
        return self.simulated_p50 / self.live_p50 - 1

    @property
    def p99_difference(self) -> float:
        """Simulated / live - 1, of p99."""
        return self.simulated_p99 / self.live_p99 - 1


@dataclass(frozen=True, slots=True)
class LiveVsSim:
    """Results of both runs.

    Attributes:
        num_requests: requests that both completed.
        most_streams: most open at once, in the simulation.
        figures: by name.
        send_delay_p99_ms: how late the load generator sent.
        simulated_cpu_seconds: CPU time of the simulation.
        replayed: the replay of the live run's journal.
        warnings: of the load generator, about itself.
    """

    num_requests: int
    seconds: float
    most_streams: int
    figures: dict[str, Figure]
    send_delay_p99_ms: float
    simulated_cpu_seconds: float
    replayed: Replayed
    warnings: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether the journal's replay found no difference."""
        return not self.replayed.differences

    def as_json(self) -> dict[str, object]:
        """Return all results as plain values."""
        replayed = {name: value for name, value in asdict(self.replayed).items() if name != "tally"}
        return asdict(self) | {
            "replayed": replayed,
            "equal": self.equal,
            "p50_differences": {name: figure.difference for name, figure in self.figures.items()},
        }


def options_for(seconds: float) -> LoadOptions:
    """Return the workload, whose requests are sent over `seconds`."""
    return LoadOptions(
        target="",
        rate=RATE,
        duration=seconds,
        input_range=INPUT_RANGE,
        output_range=OUTPUT_RANGE,
        adapters="all",
    )


async def measure(seconds: float, tell: Callable[[str], None] = lambda what: None) -> LiveVsSim:
    """Run both; the live run takes about `seconds` of arrivals plus the time until all requests end.

    Raises:
        BenchBrokenError: a request failed, or the load is outside its specified limits.
        LorreryError: the cluster did not start.
    """
    options = options_for(seconds)
    tell("simulated")
    simulated = await asyncio.to_thread(SimulatedRun(load(CONFIG, SETTINGS), options, SimulationOptions(workers=1)).run)
    tell(f"live, {simulated.wall_seconds:.0f} s")
    with tempfile.TemporaryDirectory(prefix="lorrery-") as folder:
        journal = Path(folder) / "journal.jsonl"
        live = await _live(options, [*SETTINGS, f"scheduler.journal={journal}"])
        tell("replay")
        content = read_journal(journal)
        replayed = replay(content, parts_of(content, journal))
    return _compare(live, simulated, replayed)


async def _live(options: LoadOptions, settings: list[str]) -> LoadReport:
    reports: list[LoadReport] = []

    async def drive(cluster: LocalCluster) -> None:
        reports.append(
            await load_cluster(
                _aimed_at(options, cluster.router_address),
                tls=TlsSettings(),
                registry=CollectorRegistry(),
                connect_timeout_seconds=_CONNECT_SECONDS,
                console=Console(quiet=True),
            )
        )

    async with measured_cluster(settings) as cluster:
        await while_alive(cluster, drive(cluster))
    return reports[0]


CHANGES = {
    "limit": ("scheduler.max_num_seqs=12",),
    "GPU": ("worker.gpu=L40S",),
    "policy": ("scheduler.policy=vtc_fair", "scheduler.max_num_seqs=12"),
}
"""Under each the load is served as it comes."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """One change, in ms: p50 of TTFT, TPOT and E2E.

    Attributes:
        before: of the recorded run.
        counterfactual: of its journal under the change.
        live: of the live run under the change, at its scheduler.
        seen: the same as clients saw it.
        seconds: of reading and playing the journal.
    """

    before: tuple[float, float, float]
    counterfactual: tuple[float, float, float]
    live: tuple[float, float, float]
    seen: tuple[float, float, float]
    seconds: float


async def measure_changed(seconds: float, tell: Callable[[str], None] = lambda what: None) -> dict[str, Rerun]:
    """Record a run, and compare its counterfactuals with live runs under the same changes.

    Raises:
        BenchBrokenError: as `measure`.
        LorreryError: as `measure`.
    """
    options, found = options_for(seconds), {}
    with tempfile.TemporaryDirectory(prefix="lorrery-") as folder:
        tell("live, to be recorded")
        recorded = Path(folder) / "recorded.jsonl"
        await _live(options, [*SETTINGS, f"scheduler.journal={recorded}"])
        for name, changes in CHANGES.items():
            tell(f"live, another {name}")
            journal = Path(folder) / f"{name}.jsonl"
            report = await _live(options, [*SETTINGS, *changes, f"scheduler.journal={journal}"])
            began = time.perf_counter()
            result = counterfactual(recorded, overrides=changes)
            took = time.perf_counter() - began
            again = counterfactual(journal).recorded
            found[name] = Rerun(
                before=_p50s(result.recorded.summary),
                counterfactual=_p50s(result.simulated.summary),
                live=_p50s(again.summary),
                seen=_p50s(report.summary),
                seconds=took,
            )
    return found


def _p50s(summary: Summary) -> tuple[float, float, float]:
    if summary.num_completed < summary.num_requests:
        raise BenchBrokenError(f"{summary.num_completed} of {summary.num_requests} requests completed")
    return summary.from_intended.ttft_ms.p50, summary.tpot_ms.p50, summary.from_intended.e2e_ms.p50


def changed_table(found: dict[str, Rerun]) -> Table:
    """Show each change: what the journal predicts next to a live run."""
    table = Table(title="A journal under other settings against live runs under them")
    for name in ("p50, ms", "", "recorded", "counterfactual", "live", "difference", "seen by clients", "difference"):
        table.add_column(name, justify="right" if name not in ("p50, ms", "") else "left", no_wrap=True)
    for change, rerun in found.items():
        for row, metric in enumerate(("TTFT", "TPOT", "E2E")):
            predicted, live, seen = rerun.counterfactual[row], rerun.live[row], rerun.seen[row]
            table.add_row(
                "" if row else change,
                metric,
                f"{rerun.before[row]:,.1f}",
                f"{predicted:,.1f}",
                f"{live:,.1f}",
                f"{predicted / live - 1:+.2%}",
                f"{seen:,.1f}",
                f"{predicted / seen - 1:+.2%}",
            )
    return table


def _aimed_at(options: LoadOptions, target: str) -> LoadOptions:
    return LoadOptions(**{**asdict(options), "target": target})


def _compare(live: LoadReport, simulated: LoadReport, replayed: Replayed) -> LiveVsSim:
    ours, theirs = live.summary, simulated.summary
    for side, summary in (("live", ours), ("simulated", theirs)):
        if summary.num_completed < summary.num_requests:
            raise BenchBrokenError(f"{side}: {summary.num_completed} of {summary.num_requests} requests completed")
    most_streams = most_at_once(simulated)
    if most_streams > MOST_STREAMS or ours.from_intended.ttft_ms.p50 < LEAST_TTFT_MS:
        raise BenchBrokenError(
            f"the load is not what it should be: {most_streams} streams at once (at most {MOST_STREAMS}), TTFT p50"
            f" {ours.from_intended.ttft_ms.p50:.0f} ms (at least {LEAST_TTFT_MS:g})"
        )
    return LiveVsSim(
        num_requests=ours.num_completed,
        seconds=live.wall_seconds,
        most_streams=most_streams,
        figures=_figures(ours, theirs),
        send_delay_p99_ms=ours.send_delay_ms.p99,
        simulated_cpu_seconds=simulated.simulation.cpu_seconds if simulated.simulation is not None else 0.0,
        replayed=replayed,
        warnings=live.warnings,
    )


def _figures(live: Summary, simulated: Summary) -> dict[str, Figure]:
    pairs = {
        "TTFT": (live.from_intended.ttft_ms, simulated.from_intended.ttft_ms, TTFT_AIM),
        "TPOT": (live.tpot_ms, simulated.tpot_ms, TPOT_AIM),
        "E2E": (live.from_intended.e2e_ms, simulated.from_intended.e2e_ms, E2E_AIM),
        "ITL": (live.itl_ms, simulated.itl_ms, None),
    }
    return {
        name: Figure(ours.p50, theirs.p50, ours.p99, theirs.p99, aim) for name, (ours, theirs, aim) in pairs.items()
    }


def most_at_once(report: LoadReport) -> int:
    """Return the largest number of requests open at the same time."""
    outcomes = report.outcomes
    ends = [(at, -1) for at in outcomes.end_seconds.tolist()]
    open_now = most = 0
    for _, change in sorted([(at, 1) for at in outcomes.intended_seconds.tolist()] + ends):
        open_now += change
        most = max(most, open_now)
    return most


def live_vs_sim_table(result: LiveVsSim) -> Group:
    """Show what clients measured next to what the simulation predicts."""
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
            aim = f"within {figure.aim:.0%}, {meets(abs(figure.difference) <= figure.aim)}"
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
