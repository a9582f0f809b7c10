"""Formats the results of `lorrery plan`: tables, a text plot, sentences."""

from collections.abc import Sequence

from rich.console import Console

from lorrery.scheduler.core.adapters.loads import AdapterCosts, Tier
from lorrery.scheduler.core.sequence import Adapter
from lorrery.service.settings.cluster import Settings
from lorrery.simulator.plan.options import Claim, PlanOptions
from lorrery.simulator.plan.plan import ClaimAnswer, Plan, Point
from lorrery.validation.nearest import how_far
from lorrery.view.terminal import FigureTable
from lorrery.worker.build import deployment_of
from lorrery.worker.device.basis import in_one_line, with_sources
from lorrery.worker.device.capacity import Workload
from lorrery.worker.device.deployment import weight_bytes

PLOT_COLUMNS, PLOT_ROWS = 60, 12
_PLOT_MARGINS = 17
"""Columns of the ticks on the left, and of the last stream count on the right."""


def show_one(console: Console, plan: Plan, options: PlanOptions) -> None:
    """Print everything about one deployment."""
    work = options.work
    console.print(f"[bold]{plan.name}[/bold]: {requests_in_words(work)}")
    if plan.refused is not None or plan.capacity is None:
        console.print(plan.refused)
        return
    for line in _fits(plan, work):
        console.print(line)
    for note in plan.notes:
        console.print(note, highlight=False, markup=False)
    for line in with_sources(plan.capacity.grounds):
        console.print(line, highlight=False, markup=False)
    assert plan.made_of is not None
    console.print(measured_near(*plan.made_of), highlight=False, markup=False)
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
    console.print(f"{requests_in_words(options.work)}; service level: {options.level}; times in ms, rates in tokens/s")
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
    streams = f"{counted(capacity.fitting_streams, 'stream')} at once"
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
    line = f"service level {options.level}, in a closed loop: {counted(best.concurrency, 'stream')}, {served}"
    return [f"{line}; held back by {plan.held_back_by}"]


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


def requests_in_words(work: Workload) -> str:
    """Return what requests are asked for."""
    lengths = [f"{low:,}" if low == high else f"{low:,} to {high:,}" for low, high in (work.prompt, work.output)]
    adapters = f", {work.num_adapters} adapters" if work.num_adapters else ""
    return f"prompts of {lengths[0]} tokens, answers of {lengths[1]}{adapters}"


def measured_near(settings: Settings, work: Workload) -> str:
    """Return which measured runs are nearest to a deployment, and how far the model is from them."""
    engine = (settings.engine or "slora").partition("-")[0]
    deployed, weight = deployment_of(settings), settings.worker.weight_dtype
    return how_far(engine, deployed.gpu.name, weight, deployed.model.name, adapters=work.num_adapters > 0)


def counted(number: int, what: str) -> str:
    """Return a number with its noun."""
    return f"{number} {what}{'' if number == 1 else 's'}"
