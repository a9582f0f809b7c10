"""Progress bar of a simulation. Imported only on a terminal."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from lorrery.simulator.options import Progress as RunProgress


class ProgressBar:
    """Shows a run's progress on standard error: requests, simulated time, and its speed."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("[bold]simulate"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
        )
        self._bar: TaskID = self._progress.add_task("", total=None, figures="")

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._progress.stop()

    def look(self, run: RunProgress) -> None:
        """Show the progress now."""
        elapsed = self._progress.tasks[0].elapsed or 0.0
        rate = run.simulated_seconds / elapsed if elapsed else 0.0
        self._progress.update(
            self._bar,
            completed=run.num_ended,
            total=run.num_requests or None,
            figures=f"{run.simulated_seconds:,.0f} s simulated, x {rate:,.0f}",
            refresh=True,
        )
