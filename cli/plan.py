"""`lorrery plan`: what a deployment can serve, and how many GPUs a rate needs, before anything is run.

What one replica can serve is arithmetic on step times (`worker.device.capacity` has the formulas), without queueing and
bursts. How many replicas a rate needs the simulator says (`cli.plan_sizing`). What is not said on the command line is
read from the settings, so that one plans what one deploys.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.shipped import DEFAULT_SETTINGS
from lorrery.chassis.terminal import table_console
from lorrery.cli import plan_text
from lorrery.cli.config import ConfigOption
from lorrery.cli.output import write
from lorrery.cli.plan_sizing import Cluster, Sizing, size
from lorrery.cli.version import VersionOption
from lorrery.settings import Settings
from lorrery.worker.build import deployment_of
from lorrery.worker.device.capacity import Capacity, Point, Workload
from lorrery.worker.device.errors import CatalogueError
from lorrery.worker.device.steptime import STEP_TIME_MODELS

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


@dataclass(frozen=True, slots=True)
class Level:
    """A service level, in seconds, and what is to be served within it.

    Attributes:
        rate: requests per second; None: how many replicas are needed is not asked.
        num_requests: of each simulated run; None: as many as show whether a queue grows.
        max_concurrency: streams per replica at most; None: what the settings allow.
    """

    ttft: float | None
    tpot: float | None
    rate: float | None
    num_requests: int | None
    max_concurrency: int | None


@dataclass(frozen=True, slots=True)
class Claim:
    """A seller's: prompt of so many tokens, first token within so many seconds, so many tokens per second."""

    prompt_tokens: int
    ttft: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """Whether it holds, by its two readings: every stream gets the rate, or all streams together."""

    unqueued_ttft: float
    ttft_holds: bool
    stream_tokens: float
    stream_holds: bool
    total_streams: int | None
    total_itl: float | None


@dataclass(slots=True)
class Plan:
    """One deployment's answers; `refused` says why there are none."""

    name: str
    num_gpus: int
    refused: str | None = None
    capacity: Capacity | None = None
    points: list[Point] = field(default_factory=list)
    peak: Point | None = None
    best: Point | None = None
    held_back_by: str = ""
    sizing: Sizing | None = None
    claim: ClaimAnswer | None = None

    @property
    def num_replicas(self) -> int | None:
        """The fewest that serve the rate; None if that was not asked, or none do."""
        return None if self.sizing is None else self.sizing.num_replicas


@app.command()
def plan(
    version: VersionOption = False,
    models: Annotated[
        list[str] | None, typer.Option("--model", help="Base model; repeatable; default: the settings'.")
    ] = None,
    gpus: Annotated[list[str] | None, typer.Option("--gpu", help="GPU; repeatable; default: the settings'.")] = None,
    degrees: Annotated[
        list[int] | None, typer.Option("--tp", "--tensor-parallel", min=1, help="GPUs per replica; repeatable.")
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 1750,
    output: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 500,
    adapters: Annotated[int, typer.Option(min=0, help="Adapters that streams name, all resident.")] = 0,
    ranks: Annotated[str, typer.Option("--rank", metavar="R,R,...", help="Adapter i has the i-th of these.")] = "16",
    ttft: Annotated[float | None, typer.Option(min=0, metavar="SECONDS", help="Service level: first token.")] = 1.0,
    tpot: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Service level: each further token, with stalls.")
    ] = 0.05,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="REQ/S", help="How many GPUs does this rate need? Asks the simulator."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=100, metavar="N", help="Of each simulated run; default: 10 x rate x E2E, from 1,000 to 30,000."
        ),
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Streams at once; default: powers of two, and what fits.")
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Streams per replica at most; default: running_max_req_size or max_num_seqs."
        ),
    ] = None,
    claim: Annotated[
        str | None, typer.Option(metavar="TOKENS,SECONDS,TOKENS/S", help="A seller's claim to judge, as 3500,1,300.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Plot latency against throughput; .svg, .png or .pdf.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the figures there.")] = None,
    config: ConfigOption = DEFAULT_SETTINGS,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One setting; repeatable; wins over the file."),
    ] = None,
) -> None:
    """Say what a deployment can serve: what fits, how fast, what limits it, how many GPUs a rate needs.

    With one deployment it shows TTFT without queueing, ITL, TPOT, E2E and tokens/s over concurrency; with several (any
    of --model, --gpu, --tp repeated) one line each. All that is arithmetic: nothing waits. Model, GPU, weights and KV
    types, engine, policy, limits and the step-time model come from the settings (--set worker.weight_dtype=fp8);
    options win.

    With --rate it runs `lorrery simulate` under Poisson arrivals, queueing included, and looks for the fewest
    replicas that keep the service level at p99 without a failed request. It prints each run's figures, and the
    command that repeats the decisive one.

    Exit code 1 if nothing fits.

    For example:

      lorrery plan

      lorrery plan --model Llama-3-70B --gpu H100 --tp 4 --tp 8

      lorrery plan --rate 20 --prompt 1000 --output 200 --ttft 0.5
    """
    del version
    cluster = Cluster(config, tuple(overrides or ()))
    if max_concurrency is not None:
        cluster = cluster.but(scheduler__running_max_req_size=max_concurrency, scheduler__max_num_seqs=max_concurrency)
    work = Workload(prompt, output, adapters, _numbers(ranks, "--rank"))
    level = Level(ttft, tpot, rate, requests, max_concurrency)
    asked = _claim(claim)
    streams = _numbers(concurrency, "--concurrency") if concurrency else None
    plans = [_plan(one, work, level, asked, streams) for one in _clusters(cluster, models, gpus, degrees)]
    console = table_console()
    if len(plans) == 1:
        plan_text.show_one(console, plans[0], work, level, asked)
    else:
        plan_text.show_many(console, plans, work, level, asked)
    if json_file is not None:
        rows = [_to_json(p) for p in plans]
        write(json_file, json.dumps({"workload": asdict(work), "plans": rows}, indent=1) + "\n")
    drawn = [p for p in plans if p.points]
    if plot is not None and drawn:
        from lorrery.cli import plan_plot

        plan_plot.draw(plot, drawn, work, level)
        typer.echo(f"plot: {plot}")
    if not drawn:
        raise typer.Exit(1)


def _clusters(
    cluster: Cluster, models: list[str] | None, gpus: list[str] | None, degrees: list[int] | None
) -> Iterator[Cluster]:
    for model, gpu, degree in product(models or (None,), gpus or (None,), degrees or (None,)):
        yield cluster.but(model=model, worker__gpu=gpu, worker__tensor_parallel=degree)


def _plan(cluster: Cluster, work: Workload, level: Level, claim: Claim | None, streams: Sequence[int] | None) -> Plan:
    settings = cluster.settings()
    deployment = deployment_of(settings)
    name = f"{deployment.model.name} on {deployment.tensor_parallel} x {deployment.gpu.name}"
    result = Plan(name, deployment.tensor_parallel)
    try:
        step_time = STEP_TIME_MODELS[settings.worker.step_time](deployment)
        capacity = Capacity(deployment, step_time, work, settings.scheduler.max_total_token_num)
    except CatalogueError as error:
        result.refused = str(error)
        return result
    result.capacity = capacity
    limit = _most_sequences(settings)
    most = min(capacity.max_concurrency, limit)
    if most < 1:
        result.refused = (
            f"{name}: the KV cache holds {capacity.kv_pool_tokens} tokens, less than one request's"
            f" {work.prompt_tokens + work.output_tokens}"
        )
        return result
    result.points = [capacity.point(b) for b in (streams or _with_last(_doubling(most), most)) if b <= most]
    best = capacity.most_streams(limit, level.ttft, level.tpot)
    if best:
        result.best = capacity.point(best)
        result.held_back_by = _held_back_by(capacity, best, limit, level)
    shown = [*map(capacity.point, _with_last(_doubling(most), most)), *result.points]
    result.peak = max([*shown, result.best] if result.best else shown, key=lambda point: point.total_tokens)
    if claim is not None:
        result.claim = _answer(capacity, claim, limit)
    if level.rate is not None and result.best is not None:
        result.sizing = _size(cluster, name, work, level, level.rate, result.best)
    return result


def _size(cluster: Cluster, name: str, work: Workload, level: Level, rate: float, at_level: Point) -> Sizing:
    """Ask the simulator, and show on a terminal which run is under way."""
    console = Console(stderr=True)
    with console.status(f"simulating {name}") as status:
        if not sys.stderr.isatty():
            status.stop()

        def watch(num_replicas: int) -> None:
            status.update(f"simulating {rate:g} requests/s on {num_replicas} replicas of {name}")

        return size(cluster, work, rate, at_level, level.ttft, level.tpot, level.num_requests, watch)


def _most_sequences(settings: Settings) -> int:
    """Return how many sequences the settings let run on a replica at once."""
    own = settings.scheduler
    return own.max_num_seqs if own.policy == "fcfs" else own.running_max_req_size


def _answer(capacity: Capacity, claim: Claim, max_concurrency: int) -> ClaimAnswer:
    ttft, alone = capacity.unqueued_ttft(claim.prompt_tokens), 1 / capacity.itl(1)
    streams = capacity.streams_for(claim.tokens_per_second, max_concurrency)
    return ClaimAnswer(
        unqueued_ttft=ttft,
        ttft_holds=ttft < claim.ttft,
        stream_tokens=alone,
        stream_holds=alone >= claim.tokens_per_second,
        total_streams=streams,
        total_itl=None if streams is None else capacity.itl(streams),
    )


def _held_back_by(capacity: Capacity, best: int, limit: int, level: Level) -> str:
    if best == capacity.max_concurrency:
        return "KV space"
    if best < limit:
        return "TPOT"
    return "the settings' limit on sequences" if level.max_concurrency is None else "--max-concurrency"


def _doubling(most: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `most`."""
    return [2**power for power in range(most.bit_length())]


def _with_last(streams: list[int], most: int) -> list[int]:
    return streams if streams[-1] == most else [*streams, most]


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SettingsError(f"{option} {text}: expected whole numbers, as in 8,16,32") from None
    if min(numbers) < 1:
        raise SettingsError(f"{option} {text}: every number must be at least 1")
    return numbers


def _claim(text: str | None) -> Claim | None:
    if not text:
        return None
    try:
        prompt_tokens, ttft, tokens_per_second = text.split(",")
        claim = Claim(int(prompt_tokens), float(ttft), float(tokens_per_second))
    except ValueError:
        raise SettingsError(f"--claim {text}: expected TOKENS,SECONDS,TOKENS/S, as in 3500,1,300") from None
    if claim.prompt_tokens < 1 or claim.ttft <= 0 or claim.tokens_per_second <= 0:
        raise SettingsError(f"--claim {text}: every number must be more than 0")
    return claim


def _to_json(one: Plan) -> dict[str, object]:
    capacity = one.capacity
    return {
        "deployment": one.name,
        "gpus_per_replica": one.num_gpus,
        "refused": one.refused,
        "kv_pool_tokens": capacity.kv_pool_tokens if capacity else None,
        "max_concurrency": capacity.max_concurrency if capacity else None,
        "points": [asdict(point) for point in one.points],
        "peak": asdict(one.peak) if one.peak else None,
        "within_service_level": asdict(one.best) if one.best else None,
        "replicas": one.num_replicas,
        "gpus": None if one.num_replicas is None else one.num_replicas * one.num_gpus,
        "simulated": asdict(one.sizing) if one.sizing else None,
        "claim": asdict(one.claim) if one.claim else None,
    }
