"""The model's errors in one table: every check of the shipped figures, with some lines each."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from lorrery.service.files.shipped import golden_excerpts
from lorrery.validation import kernels, posted, serving, slora, steptime, vidur
from lorrery.validation.figures import (
    MEASURED_SERVING,
    MEASURED_STEPS,
    POSTED_SERVING,
    SERVED_LORA,
    SLORA_RUNS,
    VIDUR_REQUESTS,
    VIDUR_STEPS,
    Errors,
)
from lorrery.validation.golden.replay import replay_files
from lorrery.validation.serving_rows import OK
from lorrery.validation.serving_rows import read_file as read_served
from lorrery.validation.vidur import BatchRules
from lorrery.view.terminal import FigureTable
from lorrery.worker.build import read_catalogue
from lorrery.worker.device.catalogue.tables import Catalogue

PHASES = ("linear", "decode", "prefill", "mixed")
_ALL_REDUCES = {
    "vLLM_custom_graph": "all_reduce in a CUDA graph",
    "vLLM_custom_eager": "all_reduce launched by itself, which engines avoid",
    "nccl": "all_reduce by NCCL, as older engines have it",
}


@dataclass(frozen=True, slots=True)
class Line:
    """Result of one check.

    Attributes:
        command: of `lorrery validate`, with the details.
        what: was compared.
        num_cases: number of comparisons.
        result: with its unit.
        ok: whether it passed; measured errors always pass.
    """

    command: str
    what: str
    num_cases: int
    result: str
    ok: bool = True


def checks(jobs: int = 1) -> dict[str, Callable[[], Iterable[Line]]]:
    """Return the checks by command; together half a minute of CPU.

    Args:
        jobs: processes that simulate served runs.
    """
    known = read_catalogue()
    return {
        "golden": _golden,
        "slora": lambda: _slora(known),
        "vidur": _vidur,
        "kernels": lambda: _kernels(known),
        "steptime": lambda: _steptime(known),
        "serving": lambda: _serving(jobs),
        "posted": lambda: _posted("", POSTED_SERVING, "runs that users posted", jobs),
        "lora": lambda: _posted("lora", SERVED_LORA, "published runs with adapters", jobs),
    }


def _golden() -> Iterator[Line]:
    report = replay_files(golden_excerpts())
    num_cases = report.passed + report.failed
    exact = "all exactly the same" if report.ok else f"{report.failed} differ"
    yield Line("golden", "decisions of the original programs, replayed", num_cases, exact, report.ok)


def _slora(catalogue: Catalogue) -> Iterator[Line]:
    found = [slora.predict(row, catalogue) for row in slora.read_rows(SLORA_RUNS)[0]]
    for figure in slora.FIGURES:
        errors = [abs(one.errors[figure]) for one in found]
        yield Line("slora", f"S-LoRA's published runs: {figure.replace('_', ' ')}", len(found), f"{median(errors):.1%}")


def _vidur() -> Iterator[Line]:
    compared = vidur.compare(VIDUR_REQUESTS, VIDUR_STEPS, BatchRules())
    worst = max(abs(one.error) for one in compared.quantiles)
    what = "a run of Vidur: queue, TTFT, TPOT, E2E at p50, p90, p99"
    yield Line("vidur", what, compared.num_requests, f"{worst:.1%} at most", compared.within)


def _kernels(catalogue: Catalogue) -> Iterator[Line]:
    compared = kernels.compare(kernels.read_published(), catalogue, ("op", "kernel"))
    found: dict[str, list[Errors]] = {}
    order = {kernel: place for place, kernel in enumerate(_ALL_REDUCES, 1)}
    for group in sorted(compared.groups, key=lambda group: order.get(group.key["kernel"], 0)):
        name = _ALL_REDUCES.get(group.key["kernel"], group.key["op"])
        if group.judged.mape is not None:
            found.setdefault(name, []).append(group.judged)
    for name, errors in found.items():
        yield Line("kernels", f"kernels, unseen shapes: {name}", _num_rows(errors), _mape(errors))


def _steptime(catalogue: Catalogue) -> Iterator[Line]:
    compared = steptime.compare(steptime.read_file(MEASURED_STEPS), catalogue, "roofline")
    for phase in PHASES:
        rows = [row for row in compared.rows if row.phase == phase and row.model == steptime.ALL_MODELS]
        errors = [Errors(row.n, row.mape, None) for row in rows]
        if errors:
            what = "linear layers alone" if phase == "linear" else f"{phase} steps"
            yield Line("steptime", f"measured steps: {what}", _num_rows(errors), _mape(errors))


def _serving(jobs: int) -> Iterator[Line]:
    compared = serving.compare(read_served(MEASURED_SERVING), ("backend",), jobs=jobs)
    for group in compared.groups:
        if group.quality != OK:
            continue
        for figure, errors in (("TPOT", group.tpot), ("TTFT", group.ttft)):
            if errors.mape is not None:
                what = f"measured runs of {group.key['backend']}: {figure}"
                yield Line("serving", what, errors.num_rows, _mape([errors]))


def _posted(command: str, file: Path, what: str, jobs: int) -> Iterator[Line]:
    compared = posted.compare(*posted.read_file(file), (), jobs=jobs)
    for group in compared.groups:
        if group.quality == OK and group.figure in posted.QUANTITIES and group.errors.mape is not None:
            label = posted.QUANTITIES[group.figure].partition(" (")[0]
            yield Line(command, f"{what}: {label}", group.errors.num_rows, _mape([group.errors]))


def _num_rows(errors: Iterable[Errors]) -> int:
    return sum(one.num_rows for one in errors)


def _mape(errors: Sequence[Errors]) -> str:
    """Return the mean absolute error over all rows of some groups."""
    return f"{fmean([one.mape or 0.0 for one in errors], [one.num_rows for one in errors]):.1f}%"


def render(lines: Iterable[Line]) -> FigureTable:
    """Return the lines as a table."""
    table = FigureTable()
    table.add_column("lorrery validate", justify="left")
    table.add_column("held against", justify="left", wraps_at=20)
    for name in ("cases", "error"):
        table.add_column(name)
    last = ""
    for line in lines:
        table.add_row("" if line.command == last else line.command, line.what, f"{line.num_cases:,}", line.result)
        last = line.command
    return table
