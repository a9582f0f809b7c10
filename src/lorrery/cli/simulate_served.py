"""`lorrery simulate --serve`: runs a simulation in lock step with a gRPC caller."""

import asyncio
from pathlib import Path

from rich.console import Console

from lorrery.loadgen.report import EXIT_FAILURES, EXIT_INTERRUPTED, EXIT_OK
from lorrery.loadgen.report_files import check_folder
from lorrery.loadgen.table import print_report
from lorrery.service.errors import LorreryError, exit_in_words
from lorrery.service.settings.sections import checked_address
from lorrery.simulator.lockstep import serve
from lorrery.simulator.run import SimulatedRun
from lorrery.simulator.virtual_cluster import VirtualCluster


def serve_run(run: SimulatedRun, listen: str, out: Path | None, console: Console, *, with_page: bool) -> int:
    """Serve a run, print its report once its caller has finished, and return the exit code.

    A caller may finish before the workload has ended: this is no interruption, though open requests are cut off.

    Args:
        run: a run that has not started.
        listen: HOST:PORT.
        out: folder for the report; None: it is only printed.
        console: where to print.
        with_page: write report.html too.
    """
    listen = checked_address("--serve", listen)
    if out is not None:
        check_folder(out)
    cluster = VirtualCluster(run=run)

    def listening(address: str) -> None:
        console.print(f"serving lorrery.v1.SimulationService at {address}", highlight=False, soft_wrap=True)

    try:
        result = asyncio.run(serve(cluster, listen, run.settings.server_tls, listening))
    except SystemExit as error:  # of a plug-in
        raise LorreryError(exit_in_words(error)) from None
    if result is None:
        return EXIT_INTERRUPTED
    print_report(result.report, console)
    if out is not None:
        written = list(result.write(out))
        if with_page:
            # Imported after the run: it would only slow the start.
            from lorrery.view.reports.report import report as make_page

            written.append(make_page(out))
        for path in written:
            console.print(f"report    {path}", style="dim", highlight=False, soft_wrap=True)
    return EXIT_FAILURES if result.report.summary.num_failed else EXIT_OK
