"""Shows the progress of a run: a progress bar on a terminal, otherwise a plain line every few seconds."""

import asyncio
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lorrery.loadgen.driver import Tally
from lorrery.loadgen.own_load import OwnLoadMeter

__all__ = ["show_progress"]

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
