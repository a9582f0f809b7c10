"""`lorrery plan --rate`: searches for the cheapest cluster, and says what it found as it goes."""

import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from lorrery.cli.plan_text import counted, measured_near, requests_in_words
from lorrery.service.errors import SettingsError
from lorrery.service.files.reading import read_toml
from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.linux import num_cores
from lorrery.service.settings.cluster import Settings, load
from lorrery.service.settings.reading import key_of, leaves, override_of
from lorrery.simulator.plan.cluster import Search, Watch, around, search_for
from lorrery.simulator.plan.level import Bound
from lorrery.simulator.plan.limits import all_alike, each_alike
from lorrery.simulator.plan.options import Axis, PlanOptions
from lorrery.simulator.plan.plan import curve_of
from lorrery.simulator.plan.search import Rejected
from lorrery.simulator.plan.shapes import Shape
from lorrery.view.terminal import FigureTable
from lorrery.worker.build import read_catalogue


@dataclass(frozen=True, slots=True)
class Cluster:
    """Settings as given on the command line.

    Attributes:
        config: settings file.
        overrides: `KEY=VALUE`; later ones win.
    """

    config: Path
    overrides: tuple[str, ...] = ()

    def but(self, **values: str | int | None) -> "Cluster":
        """Return a copy with settings changed; `__` in a name stands for a dot, None leaves a setting unchanged."""
        changes = (override_of(name.replace("__", "."), value) for name, value in values.items() if value is not None)
        return replace(self, overrides=(*self.overrides, *changes))

    def alone(self) -> "Cluster":
        """Return a copy with one worker per process, so that the number of processes is the number of workers."""
        return self if self.settings().worker.gpus == 1 else self.but(worker__gpus=1)

    def unscaled(self) -> "Cluster":
        """Return a copy without an autoscaler; settings of its rule would be refused as without effect."""
        others = (override for override in self.overrides if not f"{key_of(override)}.".startswith("autoscaler."))
        found = replace(self, overrides=tuple(others))
        return found.but(autoscaler__enabled=False) if found.settings().is_autoscaled else found

    def changed(self, changes: Mapping[str, object]) -> "Cluster":
        """Return a copy with settings changed."""
        texts = (f"{key}={json.dumps(value)}" for key, value in changes.items())
        return replace(self, overrides=(*self.overrides, *texts))

    def settings(self) -> Settings:
        """Read the settings.

        Raises:
            SettingsError: as `service.settings.reading.load`.
        """
        return load(self.config, self.overrides)

    def arguments(self) -> list[str]:
        """Return the options that give these settings."""
        config = [] if self.config == DEFAULT_SETTINGS else ["--config", str(self.config)]
        return [*config, *(part for override in self.overrides for part in ("--set", override))]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked for on the command line.

    Attributes:
        cluster: the settings.
        given: settings that the user has chosen, which are not searched over.
        options: checked, with all axes that the command line names.
    """

    cluster: Cluster
    given: Sequence[str]
    options: PlanOptions

    @classmethod
    def of(
        cls, cluster: Cluster, options: PlanOptions, models: Sequence[str], named: Mapping[str, Sequence[object]]
    ) -> "Question":
        """Return the question.

        Args:
            cluster: as given.
            options: checked, with a rate.
            models: named by options.
            named: setting -> values named by options.

        Raises:
            SettingsError: several models, an axis given twice, or several kinds of worker.
        """
        if len(models) > 1:
            raise SettingsError(f"--rate searches for one model; {len(models)} are named with --model")
        axes: list[Axis] = [(key, tuple(map(str, values))) for key, values in named.items() if values]
        assert isinstance(options.search, tuple)
        if both := {key for key, _ in axes} & {key for key, _ in options.search}:
            raise SettingsError(f"--search {both.pop()}: there is an option for it too; give one of them")
        options = replace(options, search=(*axes, *options.search), jobs=options.jobs or num_cores())
        base = cluster.but(model=models[0] if models else None)
        given = [key_of(override) for override in base.overrides]
        if cluster.config != DEFAULT_SETTINGS:
            given += [".".join(key) for key, _ in leaves(read_toml(cluster.config))]
        first = base.settings()
        kinds = [all_alike(first)] if named.get("worker.gpu") and first.workers else each_alike(first)
        if len(kinds) > 1:
            raise SettingsError(f"[[workers]] has {len(kinds)} groups; name one with --set worker.group=0, or --gpu")
        return cls(base.changed(kinds[0]), given, options)

    def answer(self, console: Console, *, surrounded: bool) -> tuple[Search, bool]:
        """Search, and print the bound at once and the answer; return what was found, and whether it was interrupted.

        Args:
            console: to print to.
            surrounded: whether to simulate what surrounds the answer.
        """
        search, interrupted = Search(), False
        with _progress(search) as watch:
            try:
                search_for(
                    self.cluster.settings(), self.options, search, self.given, watch,
                    lambda bounded: show_bound(console, bounded, self.options),
                )  # fmt: skip
                if surrounded and search.answer.shape is not None:
                    around(search, self.options.jobs or 1, watch)
            except KeyboardInterrupt:
                interrupted = True
        shape = search.answer.shape
        if shape is not None:
            chosen = replace(self.cluster, overrides=(*self.cluster.overrides, *shape.changes)).alone()
            search.command = command_of(chosen, self.options, search)
        show_search(console, search, self.options)
        return search, interrupted

    def curve(self, console: Console) -> tuple[dict[str, Search], bool]:
        """Search for each value of the curve, and print the table; return what was found, and if it was interrupted."""
        found: dict[str, Search] = {}
        try:
            with _progress(Search()) as watch:
                for value, search in curve_of(self.cluster.settings(), self.options, self.given, watch):
                    found.setdefault(value, search)
        except KeyboardInterrupt:
            interrupted = True
        else:
            interrupted = False
        show_curve(console, found, self.options)
        return found, interrupted


@contextmanager
def _progress(search: Search) -> Iterator[Watch]:
    """Yield what shows each run on standard error, if that is a terminal."""
    with Console(stderr=True).status("planning") as status:
        if not sys.stderr.isatty():
            status.stop()

        def watch(what: str, met: bool) -> None:
            best = search.answer
            so_far = "" if best.shape is None else f"; best so far {best.num_replicas} x {best.shape.name}"
            status.update(f"{best.num_trials} runs; {what}: {'met' if met else 'missed'}{so_far}")

        yield watch


def command_of(cluster: Cluster, options: PlanOptions, search: Search) -> str:
    """Return the `lorrery simulate` command that repeats the first run of the answer."""
    work = options.work
    assert search.asked is not None
    assert options.rate is not None
    arguments = [
        *cluster.unscaled().arguments(), "--rate", _number(options.rate), "--input-range", span(work.prompt),
        "--output-range", span(work.output), "-n", str(search.asked.num_requests),
    ]  # fmt: skip
    if work.num_adapters:
        arguments += ["--num-adapters", str(work.num_adapters), "--adapter-exponent", _number(work.exponent)]
        arguments += ["--drift", options.drift] if options.drift else []
    arguments += ["--workers", str(search.answer.num_replicas)]
    return f"lorrery simulate {shlex.join(arguments)}"


def span(lengths: tuple[int, int]) -> str:
    """Return lengths as an option has them."""
    low, high = lengths
    return str(low) if low == high else f"{low}:{high}"


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def show_bound(console: Console, search: Search, options: PlanOptions) -> None:
    """Print what no cluster can undercut."""
    assert search.least is not None
    assert search.asked is not None
    least, count = search.least, search.least.least
    gpus = f"{count * least.num_gpus} x {least.gpu}"
    console.print(
        f"{options.rate:g} requests/s of {requests_in_words(options.work)}; service level: {options.level}\n"
        f"at least {gpus}{_cost(least, count)}, by arithmetic; simulating {search.asked.num_requests:,} requests over"
        f" {search.span_seconds:,.0f} s a run, Poisson arrivals",
        markup=False,
    )


_MOST_REJECTED = 8
"""Lost runs that are shown."""


def show_search(console: Console, search: Search, options: PlanOptions) -> None:
    """Print what was found, what was not, and what it costs."""
    answer, level = search.answer, options.level
    lost = [one for one in answer.rejected if one.trial is not None]
    pruned = len(answer.rejected) - len(lost)
    table = FigureTable(first_to_go=("replicas",))
    table.add_column("deployment", justify="left", wraps_at=24)
    for name in ("replicas", "GPUs", "$/h", *(bound.name for bound in level.bounds), ""):
        table.add_column(name, justify="left" if not name else "right")
    for proof in reversed(answer.proofs):
        assert answer.shape is not None
        figures = [
            f"{bound.shown(proof.means[bound.name])}{_margin(bound, proof.margins[bound.name])}"
            for bound in level.bounds
        ]
        verdict = ("met" if proof.met else "missed") + ("" if proof.is_clear else ", not clearly")
        table.add_row(answer.shape.name, *_size(answer.shape, proof.num_replicas), *figures, verdict)
    for one in sorted(lost, key=_cost_of)[:_MOST_REJECTED]:
        assert one.trial is not None
        figures = [bound.shown(one.trial.figures[bound.name]) for bound in level.bounds]
        table.add_row(one.shape.name, *_size(one.shape, one.num_replicas), *figures, "missed")
    if answer.proofs or lost:
        console.print(table)
    more = len(lost) - _MOST_REJECTED
    notes = [
        f"{more} others missed it" if more > 0 else "",
        f"{pruned} cost no less, by arithmetic or by a run" if pruned else "",
        f"{len(search.not_shapes)} cannot be (--json says why)" if search.not_shapes else "",
    ]
    if any(notes):
        console.print(
            f"of {len(answer.rejected) + len(search.not_shapes) + 1} combinations: {', '.join(filter(None, notes))}"
        )
    for line in answer_lines(search, options):
        console.print(line, markup=False, highlight=False)
    if search.command:
        console.print(search.command, markup=False, style="dim", soft_wrap=True)


def answer_lines(search: Search, options: PlanOptions) -> list[str]:
    """Return the answer in sentences."""
    answer, shape = search.answer, search.answer.shape
    if shape is None:
        if not answer.finished:
            return ["interrupted before a cluster that keeps the level was found"]
        if search.least is None:
            return ["no combination can serve such requests", *search.not_shapes[:_MOST_REJECTED]]
        lost = max((one for one in answer.rejected if one.trial is not None), key=_cost_of).trial
        assert lost is not None
        if lost.in_vain:
            return [f"{options.rate:g} requests/s: every request fails, on any number of replicas: {lost.failure}"]
        failure = f"; of {lost.num_ended:,} requests {lost.num_failed:,} failed: {lost.failure}" if lost.failure else ""
        return [f"{options.rate:g} requests/s: no cluster that was tried keeps {options.level}{failure}"]
    so_far = "" if answer.finished else "interrupted; the best so far, not proven: "
    size = f"{counted(answer.num_replicas, 'replica')} of {shape.name}: {counted(answer.num_gpus, 'GPU')}"
    lines = [f"{so_far}{size}{_cost(shape, answer.num_replicas)}"]
    if any(not proof.is_clear for proof in answer.proofs):
        lines.append(
            f"with {options.seeds} seeds an interval holds the limit: one replica more or less cannot be told apart;"
            f" --seeds {2 * options.seeds} tells more"
        )
    return [
        *lines,
        *_money(search, options),
        *_room(search),
        *search.notes,
        measured_near(shape.settings, options.work),
    ]


def _room(search: Search) -> list[str]:
    """Return how many tenants the answer has room for, and what the first one beyond costs."""
    tenants, shape, asked = search.tenants, search.answer.shape, search.asked
    if tenants is None or shape is None or asked is None:
        return []
    now = asked.work.num_adapters
    more = tenants.held - now
    if more < 0:
        return []
    usd = "" if shape.usd_per_hour is None else f", ${shape.usd_per_hour:,.2f}/h"
    room = f"room for {'at least ' if tenants.at_least else ''}{more} more" if more else "no room for more"
    return [
        f"{room} of such tenants, each with {asked.rate / now:.3g} requests/s; the next takes one replica more{usd}"
        if not tenants.at_least
        else f"{room} of such tenants, each with {asked.rate / now:.3g} requests/s"
    ]


def _money(search: Search, options: PlanOptions) -> list[str]:
    """Return what the answer costs per token and tenant, and the power that it may take."""
    answer, shape, work = search.answer, search.answer.shape, options.work
    assert shape is not None
    assert options.rate is not None
    catalogue, lines = read_catalogue(shape.settings.catalogue), list[str]()
    millions = options.rate * work.output_tokens * 3600 / 1e6
    price, usd, watts = catalogue.price(shape.gpu), answer.usd_per_hour, catalogue.gpu(shape.gpu).watts
    if price is None or usd is None:
        lines.append(f"no price of {shape.gpu} is known, so GPUs are counted (docs/capacity.md, prices)")
    else:
        tenant = ""
        if work.num_adapters:
            least, most = (usd * float(share) for share in (work.shares[-1], work.shares[0]))
            spread = f"${most:.2f}/h" if least == most else f"${least:.2f} to ${most:.2f}/h"
            tenant = f"; {spread} for each of {work.num_adapters} tenants, by their requests"
        lines.append(
            f"${usd / millions:.2f} per million output tokens{tenant}; {price.source}, {price.date}:"
            f" ${price.usd_per_hour:g}/h for one {shape.gpu}"
        )
    if watts is not None:
        kilowatts = answer.num_gpus * watts / 1e3
        lines.append(
            f"at most {kilowatts:,.1f} kW, {kilowatts / millions:.2f} kWh per million output tokens: {watts:g} W a GPU,"
            " its data sheet's, all the time (assumed)"
        )
    return lines


def _size(shape: Shape, number: int) -> tuple[str, str, str]:
    usd = shape.usd_per_hour
    return str(number), str(number * shape.num_gpus), "-" if usd is None else f"{usd * number:,.2f}"


def _cost(shape: Shape, number: int) -> str:
    return "" if shape.usd_per_hour is None else f", ${shape.usd_per_hour * number:,.2f}/h"


def _cost_of(one: Rejected) -> float:
    return one.num_replicas * (one.shape.usd_per_hour or one.shape.num_gpus)


def _margin(bound: Bound, margin: float) -> str:
    return f" ±{bound.shown(margin).removesuffix(' ms')}" if math.isfinite(margin) else ""


def show_curve(console: Console, found: Mapping[str, Search], options: PlanOptions) -> None:
    """Print the answer for each value, and what the next one costs more."""
    assert isinstance(options.curve, tuple)
    ((key, _),) = options.curve
    of_adapters = key == "adapters"
    table = FigureTable(first_to_go=("replicas",))
    table.add_column(key.rpartition(".")[2])
    table.add_column("cheapest", justify="left", wraps_at=24)
    for name in ("replicas", "GPUs", "$/h", *(["$/h each", "$/h for one more"] if of_adapters else [])):
        table.add_column(name)
    before: tuple[int, float] | None = None
    for value, search in found.items():
        answer = search.answer
        if answer.shape is None:
            table.add_row(value, _why_none(search), *["-"] * (5 if of_adapters else 3))
            continue
        cells = [value, answer.shape.name, *_size(answer.shape, answer.num_replicas)]
        usd = answer.usd_per_hour
        if of_adapters:
            each = "-" if usd is None or not int(value) else f"{usd / int(value):,.3f}"
            more = "-" if usd is None or before is None else f"{(usd - before[1]) / (int(value) - before[0]):,.3f}"
            cells += [each, more]
            before = None if usd is None else (int(value), usd)
        table.add_row(*cells)
    console.print(table)
    note = f"; requests/s are {options.rate:g} at every number of adapters" if of_adapters else ""
    console.print(f"service level: {options.level}{note}", markup=False, highlight=False)


def _why_none(search: Search) -> str:
    lost = [one.trial for one in search.answer.rejected if one.trial is not None]
    if search.least is None:
        return f"none: {search.not_shapes[0]}" if search.not_shapes else "none"
    return f"none: {lost[0].failure}" if lost and lost[0].in_vain else "none keeps the level"
