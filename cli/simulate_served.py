"""`lorrery simulate --serve`: a run in lock step with a caller over gRPC."""

import asyncio
from pathlib import Path

from rich.console import Console

from lorrery.chassis.sections import checked_address
from lorrery.loadgen.report_files import check_folder
from lorrery.loadgen.table import print_report
from lorrery.lockstep.service import serve
from lorrery.simulator.run import SimulatedRun
from lorrery.simulator.virtual_cluster import VirtualCluster

INTERRUPTED = 130


def serve_run(run: SimulatedRun, listen: str, out: Path | None, console: Console) -> int:
    """Serve a run, print its report once its caller has finished, and return the exit code.

    Args:
        run: that has not begun.
        listen: HOST:PORT.
        out: folder for the report; None: it is only printed.
        console: where to print.
    """
    listen = checked_address("--serve", listen)
    if out is not None:
        check_folder(out)
    cluster = VirtualCluster(run=run)

    def listening(address: str) -> None:
        console.print(f"serving lorrery.v1.SimulationService at {address}", highlight=False, soft_wrap=True)

    result = asyncio.run(serve(cluster, listen, run.settings.server_tls, listening))
    if result is None:
        return INTERRUPTED
    print_report(result.report, console)
    if out is not None:
        for path in result.write(out):
            console.print(f"report    {path}", style="dim", highlight=False, soft_wrap=True)
    return result.report.exit_code
