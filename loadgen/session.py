"""One run from options to report: connect, build the workload, play it, print, write."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lorrery.loadgen import option_rules
from lorrery.loadgen.client import RouterClient
from lorrery.loadgen.driver import Driver, DriveSettings, Tally
from lorrery.loadgen.http.client import HttpClient
from lorrery.loadgen.http.routes import Chat, Completions, Route, Slora
from lorrery.loadgen.metrics import LoadMetrics
from lorrery.loadgen.options import LoadOptions
from lorrery.loadgen.reception import ClusterView
from lorrery.loadgen.report import UNSENT, LoadReport, OwnLoadMeter, make_report
from lorrery.loadgen.report_files import check_folder, write_report
from lorrery.loadgen.source import BuiltWorkload, admissible, build_workload
from lorrery.loadgen.table import print_report
from lorrery.loadgen.workload.outcome import OK, OutcomeTable
from lorrery.service.entry_point import handled_by
from lorrery.service.network.channel import check_target
from lorrery.service.settings.sections import TlsSettings, checked_address
from lorrery.service.tasks import loop_factory
from lorrery.service.telemetry.metrics import new_registry, serve_metrics
from lorrery.vocabulary.adapters import FiguresByAdapter, summed


def run_load(
    options: LoadOptions,
    *,
    tls: TlsSettings,
    api_key: str = "",
    out: Path | None,
    with_page: bool = True,
    metrics_address: str | None,
    connect_timeout_seconds: float,
    console: Console,
) -> int:
    """Play a workload against a cluster, print its figures, write its report with a page, and return the exit code.

    Ctrl-C or SIGTERM ends the run early; what was measured until then is still reported.

    Raises:
        LorreryError: invalid options, an unreadable trace, or no cluster.
    """
    option_rules.check(options)
    if options.protocol == "grpc":
        check_target("--target", options.target)
    if out is not None:
        check_folder(out)
    if metrics_address is not None:
        checked_address("--metrics", metrics_address)
    registry = new_registry("loadgen")
    endpoint = serve_metrics(metrics_address, registry, "--metrics") if metrics_address is not None else None
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            report = runner.run(
                load_cluster(
                    options,
                    tls=tls,
                    api_key=api_key,
                    registry=registry,
                    connect_timeout_seconds=connect_timeout_seconds,
                    console=console,
                )
            )
    finally:
        if endpoint is not None:
            endpoint.close()
    print_report(report, console)
    if out is not None:
        for path in write_report(report, out):
            console.print(f"report    {path}", style="dim", highlight=False, soft_wrap=True)
        if with_page:
            # Imported when the run has ended: it would only slow the start.
            from lorrery.view.reports.report import report as make_page

            console.print(f"report    {make_page(out)}", style="dim", highlight=False, soft_wrap=True)
    return report.exit_code


async def load_cluster(
    options: LoadOptions,
    *,
    tls: TlsSettings,
    api_key: str = "",
    registry: CollectorRegistry,
    connect_timeout_seconds: float,
    console: Console,
) -> LoadReport:
    """Play a workload against a cluster and return the report.

    Raises:
        LorreryError: as `run_load`.
    """
    async with _client(options, tls, api_key) as client:
        cluster = await client.cluster(connect_timeout_seconds)
        known = await client.adapters(connect_timeout_seconds)
        workload, num_skipped = admissible(options, build_workload(options, known), cluster)
        _announce(options, workload, cluster, console)

        async def figures() -> list[FiguresByAdapter] | None:
            if not known or not isinstance(client, RouterClient):
                return None
            return await client.adapter_figures(connect_timeout_seconds)

        driver = Driver(client, _drive_settings(options), cluster.time_scale, LoadMetrics(registry))
        own_load = OwnLoadMeter()
        with _stopped_by_signals(driver):
            display = asyncio.create_task(show_progress(driver.tally, own_load, console))
            try:
                await driver.warm_up(workload.requests)
                figures_before = await figures()
                own_load.restart()
                started_at = datetime.now(UTC)
                await driver.run(workload.requests)
            finally:
                display.cancel()
                await asyncio.wait((display,))
        adapters, figures_after = None, await figures()
        notices = _notices(driver, options)
        if figures_before is not None and figures_after is not None:
            try:
                adapters = summed(figures_after, figures_before)
            except ValueError:
                notices = (*notices, "a scheduler has started again, so loads of adapters are not known")
        return make_report(
            options,
            workload,
            cluster,
            OutcomeTable.of(driver.outcomes),
            own_load=own_load.read(),
            started_at=started_at,
            interrupted=driver.interrupted,
            num_skipped=num_skipped,
            num_warmup_failed=sum(outcome.status != OK for outcome in driver.warmup_outcomes),
            notices=notices,
            adapters=adapters,
        )


def _client(options: LoadOptions, tls: TlsSettings, api_key: str) -> RouterClient | HttpClient:
    match options.protocol:
        case "grpc":
            return RouterClient(options.target, tls, api_key)
        case "openai":
            route: Route = Completions(prompt_ids=options.prompt_ids)
        case "openai-chat":
            route = Chat()
        case "slora":
            route = Slora()
    return HttpClient(options.target, route, tls, api_key, options.model, needs_list=options.protocol != "slora")


def _notices(driver: Driver, options: LoadOptions) -> tuple[str, ...]:
    found: list[str] = []
    if driver.num_without_usage:
        counted = "each event with text counts as one, so TPOT, ITL and tokens/s are of events"
        if options.protocol == "slora" and options.ignore_eos:
            counted = "they count as the tokens that they were asked for"
        found.append(f"the server did not say how many tokens {driver.num_without_usage} outputs had; {counted}")
    if driver.num_unsent:
        found.append(UNSENT.format(driver.num_unsent))
    return tuple(found)


def _announce(options: LoadOptions, workload: BuiltWorkload, cluster: ClusterView, console: Console) -> None:
    requests = workload.requests
    if options.concurrency is None:
        what = f"{len(requests):,} requests over {requests[-1].at_seconds * cluster.time_scale:.0f} s"
    elif options.repeats:
        what = f"{options.concurrency} clients for {(options.schedule_seconds or 0.0) * cluster.time_scale:.0f} s"
    else:
        what = f"{len(requests):,} requests, {options.concurrency} at a time,"
    console.print(f"{what} to {options.target} ({cluster.model or 'model unknown'})", highlight=False)
    if cluster.workers == ():
        console.print("no worker is attached yet; requests wait for one", style="yellow")


def _drive_settings(options: LoadOptions) -> DriveSettings:
    return DriveSettings(
        seed=options.seed,
        ignore_eos=options.ignore_eos,
        max_new_tokens=options.max_new_tokens,
        timeout_seconds=options.timeout,
        concurrency=options.concurrency,
        duration_seconds=options.schedule_seconds,
        repeat=options.repeats,
        warmup_requests=options.warmup,
    )


@contextlib.contextmanager
def _stopped_by_signals(driver: Driver) -> Iterator[None]:
    with handled_by(asyncio.get_running_loop(), lambda _number: driver.stop()):
        yield


_BAR_PERIOD_SECONDS = 0.2
_LINE_PERIOD_SECONDS = 5.0
_LEAST_BAR, _MOST_BAR, _BESIDE_BAR = 2, 24, 66
"""Columns of the bar, and of the text beside it: bar and elapsed time shrink before a digit is cut."""
_RATE_SPAN_SECONDS = 2.0


class _TokenRate:
    """Output tokens per wall second over the last few samples."""

    def __init__(self, now: float) -> None:
        self._looks = [(now, 0)]

    def look(self, now: float, tokens: int) -> float:
        if tokens < self._looks[-1][1]:  # the warm-up has ended and the count restarts
            self._looks = [(now, 0)]
        self._looks.append((now, tokens))
        while len(self._looks) > 2 and now - self._looks[1][0] >= _RATE_SPAN_SECONDS:
            del self._looks[0]
        then, before = self._looks[0]
        return (tokens - before) / (now - then) if now > then else 0.0


async def show_progress(tally: Tally, own_load: OwnLoadMeter, console: Console) -> None:
    """Show `tally` until cancelled, and sample the process's own load meanwhile."""
    if console.is_terminal:
        await _bar(tally, own_load, console)
    else:
        await _lines(tally, own_load, console)


async def _bar(tally: Tally, own_load: OwnLoadMeter, console: Console) -> None:
    bar_width = max(_LEAST_BAR, min(_MOST_BAR, console.width - _BESIDE_BAR))
    elapsed = [TimeElapsedColumn()] if console.width >= _BESIDE_BAR + _LEAST_BAR else []
    progress = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=bar_width),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        *elapsed,
        console=console,
        transient=True,
        auto_refresh=False,  # its thread would compete with the event loop
    )
    with progress:
        task = progress.add_task(tally.phase, total=None, figures="")

        def show(tokens_per_second: float) -> None:
            failed = f"[red]{tally.num_failed} failed[/]" if tally.num_failed else "0 failed"
            progress.update(
                task,
                description=tally.phase,
                completed=tally.num_ended,
                total=tally.num_requests or None,
                figures=f"{tally.num_sent} sent  {failed}  {tokens_per_second:,.0f} tok/s",
                refresh=True,
            )

        await _repeat(tally, own_load, _BAR_PERIOD_SECONDS, show)


async def _lines(tally: Tally, own_load: OwnLoadMeter, console: Console) -> None:
    def show(tokens_per_second: float) -> None:
        console.print(
            f"{tally.phase}: {tally.num_ended}/{tally.num_requests or '?'} done, {tally.num_sent} sent,"
            f" {tally.num_failed} failed, {tokens_per_second:,.0f} tok/s",
            highlight=False,
            soft_wrap=True,
        )

    await _repeat(tally, own_load, _LINE_PERIOD_SECONDS, show)


async def _repeat(tally: Tally, own_load: OwnLoadMeter, period: float, show: Callable[[float], None]) -> None:
    rate = _TokenRate(time.monotonic())
    next_show = time.monotonic() + period
    while True:
        # Often enough for the windows of the own load, whatever the display's period.
        await asyncio.sleep(min(period, 1.0))
        own_load.sample()
        tokens_per_second = rate.look(time.monotonic(), tally.output_tokens)
        if time.monotonic() >= next_show - 0.01:
            show(tokens_per_second)
            next_show += period
