"""Formats the results of `lorrery plan`: tables, a text plot, sentences."""

import math
from collections.abc import Sequence

from rich.console import Console

from lorrery.scheduler.core.adapters.loads import AdapterCosts, Tier
from lorrery.scheduler.core.sequence import Adapter
from lorrery.simulator.plan.level import Bound
from lorrery.simulator.plan.options import Claim, PlanOptions
from lorrery.simulator.plan.plan import ClaimAnswer, Plan, Point, Search
from lorrery.simulator.plan.search import Rejected
from lorrery.simulator.plan.shapes import Shape
from lorrery.view.terminal import FigureTable
from lorrery.worker.build import read_catalogue
from lorrery.worker.device.basis import in_one_line, with_sources
from lorrery.worker.device.capacity import Workload
from lorrery.worker.device.deployment import weight_bytes

PLOT_COLUMNS, PLOT_ROWS = 60, 12
_PLOT_MARGINS = 17
"""Columns of the ticks on the left, and of the last stream count on the right."""


def show_one(console: Console, plan: Plan, options: PlanOptions) -> None:
    """Print everything about one deployment."""
    work = options.work
    console.print(f"[bold]{plan.name}[/bold]: {_requests(work)}")
    if plan.refused is not None or plan.capacity is None:
        console.print(plan.refused)
        return
    for line in _fits(plan, work):
        console.print(line)
    for note in plan.notes:
        console.print(note, highlight=False, markup=False)
    for line in with_sources(plan.capacity.grounds):
        console.print(line, highlight=False, markup=False)
    console.print(f"TTFT without queueing: {plan.capacity.unqueued_ttft() * 1e3:.0f} ms")
    console.print()
    if plan.points:
        console.print("streams that each ask again as soon as they are answered, simulated; averages:")
        console.print(_points(plan.points))
        console.print()
    drawn = draw_points(plan.points, min(PLOT_COLUMNS, console.width - _PLOT_MARGINS))
    for line in drawn:
        console.print(line, markup=False)
    if drawn:
        console.print()
    for line in _service(plan, options):
        console.print(line)
    for line in _claim_lines(plan, options.claim):
        console.print(line)


def show_many(console: Console, plans: Sequence[Plan], options: PlanOptions) -> None:
    """Print one line per deployment."""
    console.print(f"{_requests(options.work)}; service level: {options.level}; times in ms, rates in tokens/s")
    table = FigureTable(first_to_go=("KV tokens", "8", "32", "one stream", "ITL b=1"))
    table.add_column("deployment", justify="left", wraps_at=16)
    names = ["TTFT without queueing", "ITL b=1", "8", "32", "one stream", "peak (b)", "in level (b)", "KV tokens"]
    for name in names:
        table.add_column(name)
    for plan in plans:
        if plan.capacity is None or plan.peak is None:
            table.add_row(plan.name, *["-"] * len(names))
            continue
        capacity = plan.capacity
        best = "none" if plan.best is None else f"{_whole(plan.best.total_tokens)} ({plan.best.concurrency})"
        row = [
            f"{capacity.unqueued_ttft() * 1e3:.0f}",
            *(f"{capacity.itl(b) * 1e3:.1f}" if b <= capacity.running_streams else "-" for b in (1, 8, 32)),
            f"{1 / capacity.itl(1):.0f}",
            f"{_whole(plan.peak.total_tokens)} ({plan.peak.concurrency})",
            best,
            _thousands(capacity.kv_pool_tokens),
        ]
        table.add_row(plan.name, *row)
    console.print(table)
    for plan in plans:
        if plan.refused is not None:
            console.print(plan.refused)
    for note, names in _notes(plans).items():
        console.print(f"{', '.join(names)}: {note}", highlight=False, markup=False)
    for lines, names in _bases(plans).items():
        console.print(f"basis of {', '.join(names)}: {lines}", highlight=False, markup=False)
    if options.claim is not None:
        console.print()
        console.print(_claim_heading(options.claim))
        console.print(_claims(plans, options.claim))


def _notes(plans: Sequence[Plan]) -> dict[str, list[str]]:
    """Return each note on what the figures omit -> the deployments to which it applies."""
    found: dict[str, list[str]] = {}
    for plan in plans:
        for note in plan.notes:
            found.setdefault(note, []).append(plan.name)
    return found


def _bases(plans: Sequence[Plan]) -> dict[str, list[str]]:
    """Return each basis of the figures -> the deployments to which it applies."""
    found: dict[str, list[str]] = {}
    for plan in plans:
        if plan.capacity is not None:
            found.setdefault(in_one_line(plan.capacity.grounds), []).append(plan.name)
    return found


def draw_points(points: Sequence[Point], columns: int = PLOT_COLUMNS) -> list[str]:
    """Draw E2E over the tokens/s of all streams, with the stream count at each point; `columns`: of the x axis."""
    if len(points) < 2:
        return []
    widest, highest = max(p.total_tokens for p in points), max(p.e2e for p in points)
    canvas = [[" "] * (columns + 8) for _ in range(PLOT_ROWS + 1)]
    for point in points:
        row = PLOT_ROWS - round(point.e2e / highest * PLOT_ROWS)
        column = round(point.total_tokens / widest * columns)
        label = str(point.concurrency)
        if all(mark == " " for mark in canvas[row][column : column + len(label) + 1]):
            canvas[row][column : column + len(label)] = label
        else:
            canvas[row][column] = "+"
    lines = ["E2E seconds over tokens/s of all streams; at each point the number of streams"]
    for index, marks in enumerate(canvas):
        tick = f"{highest * (PLOT_ROWS - index) / PLOT_ROWS:7.1f}" if index % 3 == 0 else " " * 7
        lines.append(f"{tick} |{''.join(marks).rstrip()}")
    lines.append(" " * 8 + "+" + "-" * columns)
    left, middle, right = "0", _whole(widest / 2), _whole(widest)
    half = columns // 2
    ticks = left + middle.rjust(half - len(left) + len(middle) // 2)
    lines.append(" " * 9 + ticks + right.rjust(columns - len(ticks) + len(right) // 2))
    return lines


def _fits(plan: Plan, work: Workload) -> list[str]:
    capacity = plan.capacity
    assert capacity is not None
    deployment, gpu = capacity.deployment, capacity.deployment.gpu
    weights = weight_bytes(deployment.model, deployment.precision, deployment.expert_parallel)
    adapters = f" - {capacity.adapter_bytes / 1e9:.1f} adapters" if work.num_adapters else ""
    use = deployment.memory
    left = (use.left_bytes(gpu, plan.num_gpus, weights) - capacity.adapter_bytes) / 1e9
    memory, own, share = use.memory_gb(gpu) * plan.num_gpus, use.own_gb * plan.num_gpus, float(use.share)
    taken = f"{own:g} - {weights / 1e9:.1f} weights"
    room = f"{share:g} x ({memory:g} - {taken})" if use.of_rest else f"{share:g} x {memory:g} - {taken}"
    room = f"memory: {room}{adapters} = {left:.1f} GB"
    pool = f"{capacity.fitting_kv_tokens} KV tokens"
    if capacity.kv_pool_tokens != capacity.fitting_kv_tokens:
        pool += f"; scheduler.max_total_token_num is {capacity.kv_pool_tokens}"
    if capacity.block_size is not None:
        pool += f" in blocks of {capacity.block_size}"
    streams = f"{_counted(capacity.fitting_streams, 'stream')} at once"
    if capacity.running_streams < capacity.fitting_streams:
        streams += f"; scheduler.{plan.limit_name} lets {capacity.running_streams} run"
    lines = [f"{room} for {pool}: {streams}"]
    if work.num_adapters:
        assert plan.made_of is not None
        rank, settings = max(work.adapters_of_rank), plan.made_of[0]
        given = settings.adapters
        rate = given.host_gb_per_second
        costs = AdapterCosts(deployment.model, given.target_modules, rate, given.disk_gb_per_second)
        host, disk = (costs.load_ps(Adapter("", rank), tier) / 1e9 for tier in (Tier.HOST, Tier.DISK))
        line = (
            f"an adapter of rank {rank} that is not resident delays its first token by {host:.1f} ms from host memory,"
            f" {disk:.1f} ms from disk"
        )
        if rate != gpu.pcie_gb_per_second:
            line += (
                f" (adapters.host_gb_per_second is {rate:g}; pinned memory over this GPU's PCIe gets about"
                f" {gpu.pcie_gb_per_second:g})"
            )
        lines.append(line)
    return lines


def _points(points: Sequence[Point]) -> FigureTable:
    table = FigureTable(first_to_go=("KV %", "E2E s", "tok/s each", "ITL ms"))
    for name in ("streams", "TTFT ms", "ITL ms", "TPOT ms", "E2E s", "tok/s each", "tok/s all", "req/s", "KV %"):
        table.add_column(name)
    table.add_column("limit", justify="left", wraps_at=16)
    for point in points:
        share = f" {point.shares[point.limit]:.0%}" if point.limit in point.shares else ""
        table.add_row(
            str(point.concurrency),
            f"{point.ttft * 1e3:.0f}",
            f"{point.itl * 1e3:.1f}",
            f"{point.tpot * 1e3:.1f}",
            f"{point.e2e:.1f}",
            f"{point.stream_tokens:.1f}",
            f"{point.total_tokens:.0f}",
            f"{point.requests:.2f}",
            f"{point.kv_ratio * 100:.0f}",
            point.limit + share,
        )
    return table


def _service(plan: Plan, options: PlanOptions) -> list[str]:
    best = plan.best
    if best is None:
        return [f"service level {options.level}: not even one stream keeps it"]
    served = f"{_whole(best.total_tokens)} tokens/s in all, {best.requests:.2f} requests/s"
    line = f"service level {options.level}, in a closed loop: {_counted(best.concurrency, 'stream')}, {served}"
    return [f"{line}; held back by {plan.held_back_by}"]


def show_bound(console: Console, search: Search, options: PlanOptions) -> None:
    """Print what no cluster can undercut."""
    assert search.least is not None
    least, count = search.least, search.least.least
    gpus = f"{count * least.num_gpus} x {least.gpu}"
    console.print(
        f"{options.rate:g} requests/s of {_requests(options.work)}; service level: {options.level}\n"
        f"at least {gpus}{_cost(least, count)}, by arithmetic; simulating {search.num_requests:,} requests over"
        f" {search.span_seconds:,.0f} s a run, Poisson arrivals",
        markup=False,
    )


_MOST_REJECTED = 8
"""Lost runs that are shown."""


def show_search(console: Console, search: Search, options: PlanOptions, *, interrupted: bool) -> None:
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
    for line in _answer(search, options, interrupted=interrupted):
        console.print(line, markup=False, highlight=False)
    if search.command:
        console.print(search.command, markup=False, style="dim", soft_wrap=True)


def _answer(search: Search, options: PlanOptions, *, interrupted: bool) -> list[str]:
    answer, shape = search.answer, search.answer.shape
    if shape is None:
        if interrupted:
            return ["interrupted before a cluster that keeps the level was found"]
        if search.least is None:
            return ["no combination can serve such requests", *search.not_shapes[:_MOST_REJECTED]]
        lost = max((one for one in answer.rejected if one.trial is not None), key=_cost_of).trial
        assert lost is not None
        if lost.in_vain:
            return [f"{options.rate:g} requests/s: every request fails, on any number of replicas: {lost.failure}"]
        failure = f"; of {lost.num_ended:,} requests {lost.num_failed:,} failed: {lost.failure}" if lost.failure else ""
        return [f"{options.rate:g} requests/s: no cluster that was tried keeps {options.level}{failure}"]
    so_far = "interrupted; the best so far, not proven: " if interrupted or not answer.finished else ""
    size = f"{_counted(answer.num_replicas, 'replica')} of {shape.name}: {_counted(answer.num_gpus, 'GPU')}"
    lines = [f"{so_far}{size}{_cost(shape, answer.num_replicas)}"]
    if any(not proof.is_clear for proof in answer.proofs):
        lines.append(
            f"with {options.seeds} seeds an interval holds the limit: one replica more or less cannot be told apart;"
            f" --seeds {2 * options.seeds} tells more"
        )
    return [*lines, *_money(search, options), *search.notes]


def _money(search: Search, options: PlanOptions) -> list[str]:
    """Return what the answer costs per token and tenant, and the power that it may take."""
    answer, shape, work = search.answer, search.answer.shape, options.work
    assert shape is not None
    assert options.rate is not None
    catalogue, lines = read_catalogue(shape.settings.catalogue), []
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


def _requests(work: Workload) -> str:
    lengths = [f"{low:,}" if low == high else f"{low:,} to {high:,}" for low, high in (work.prompt, work.output)]
    adapters = f", {work.num_adapters} adapters" if work.num_adapters else ""
    return f"prompts of {lengths[0]} tokens, answers of {lengths[1]}{adapters}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _claim_lines(plan: Plan, claim: Claim | None) -> list[str]:
    answer = plan.claim
    if claim is None or answer is None:
        return []
    lines = [_claim_heading(claim)]
    verdict = "true" if answer.ttft_holds else "false"
    lines.append(f"  first token: {verdict}, {answer.unqueued_ttft * 1e3:.0f} ms without queueing")
    verdict = "true" if answer.stream_holds else "false"
    lines.append(f"  rate, read as one stream's: {verdict}, at most {answer.stream_tokens:.0f} tokens/s")
    lines.append(f"  rate, read as all streams' together: {_together(answer)}")
    return lines


def _claim_heading(claim: Claim) -> str:
    return (
        f'claim "{claim.prompt_tokens} tokens in, first token within {claim.ttft:g} s,'
        f' {claim.tokens_per_second:g} tokens/s":'
    )


def _claims(plans: Sequence[Plan], claim: Claim) -> FigureTable:
    table = FigureTable()
    table.add_column("deployment", justify="left", wraps_at=16)
    table.add_column(f"TTFT of {claim.prompt_tokens} without queueing")
    table.add_column("rate as one stream's", justify="left")
    table.add_column("rate as all streams' together", justify="left", wraps_at=20)
    for plan in plans:
        answer = plan.claim
        if answer is None:
            table.add_row(plan.name, "does not fit", "", "")
            continue
        holds = "true" if answer.ttft_holds else "false"
        alone = "true" if answer.stream_holds else "false"
        table.add_row(
            plan.name,
            f"{holds}, {answer.unqueued_ttft * 1e3:.0f} ms",
            f"{alone}, {answer.stream_tokens:.0f}",
            _together(answer),
        )
    return table


def _together(answer: ClaimAnswer) -> str:
    if answer.total_streams is None or answer.total_itl is None:
        return "false, at any concurrency that fits"
    return f"true from {answer.total_streams} streams on (ITL {answer.total_itl * 1e3:.1f} ms)"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _thousands(value: int) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.0f}k"
