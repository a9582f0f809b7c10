"""`lorrery plan`: what a deployment can serve, and how many GPUs a rate needs, before anything is run.

Arithmetic on step times (`worker.device.capacity` has the formulas): no queue and no bursts, which is what
`lorrery simulate` is for. What is not said on the command line is read from the settings, so that one plans what one
deploys.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.settings import Settings, load
from lorrery.chassis.shipped import DEFAULT_SETTINGS
from lorrery.chassis.terminal import table_console
from lorrery.cli import plan_text
from lorrery.cli.config import ConfigOption
from lorrery.cli.output import write
from lorrery.cli.version import VersionOption
from lorrery.worker.build import deployment_of
from lorrery.worker.device.capacity import Capacity, Point, Workload, replicas_for
from lorrery.worker.device.deployment import Deployment
from lorrery.worker.device.errors import CatalogueError
from lorrery.worker.device.steptime import STEP_TIME_MODELS

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


@dataclass(frozen=True, slots=True)
class Level:
    """A service level and a rate: seconds, requests per second, share of a replica's best rate to plan with."""

    ttft: float | None
    tpot: float | None
    rate: float | None
    use: float
    max_concurrency: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A seller's: prompt of so many tokens, first token within so many seconds, so many tokens per second."""

    prompt_tokens: int
    ttft: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """Whether it holds, by its two readings: every stream gets the rate, or all streams together."""

    ttft: float
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
    num_replicas: int | None = None
    claim: ClaimAnswer | None = None


@app.command()
def plan(
    version: VersionOption = False,
    models: Annotated[list[str] | None, typer.Option("--model", help="Base model; repeatable.")] = None,
    gpus: Annotated[list[str] | None, typer.Option("--gpu", help="GPU; repeatable.")] = None,
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
    rate: Annotated[float | None, typer.Option(min=0, metavar="REQ/S", help="How many GPUs does this need?")] = None,
    use: Annotated[float, typer.Option(min=0.05, max=1.0, help="Share of a replica's best rate to plan with.")] = 0.8,
    concurrency: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Streams at once; default: powers of two, and what fits.")
    ] = None,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Never plan with more streams per replica.")] = 512,
    claim: Annotated[
        str, typer.Option(metavar="TOKENS,SECONDS,TOKENS/S", help="A seller's claim to judge; '' for none.")
    ] = "3500,1,300",
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Plot latency against throughput; .svg, .png or .pdf.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the figures there.")] = None,
    config: ConfigOption = DEFAULT_SETTINGS,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; repeatable; wins over all.")
    ] = None,
) -> None:
    """Say what a deployment can serve: what fits, how fast, what limits it, how many GPUs a rate needs.

    With one deployment it shows TTFT, ITL, TPOT, E2E and tokens/s over concurrency; with several (any of --model,
    --gpu, --tp repeated) one line each. Weights and KV types, engine, adapter kernels and the step-time model come from
    the settings (--set worker.weight_dtype=fp8). Exit code 1 if nothing fits.
    """
    settings = load(config, overrides or ())
    work = Workload(prompt, output, adapters, _numbers(ranks, "--rank"))
    level = Level(ttft, tpot, rate, use, max_concurrency)
    asked = _claim(claim)
    streams = _numbers(concurrency, "--concurrency") if concurrency else None
    plans = [
        _plan(name, deployment, settings.worker.step_time, work, level, asked, streams)
        for name, deployment in _deployments(settings, models, gpus, degrees)
    ]
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


def _deployments(
    settings: Settings, models: list[str] | None, gpus: list[str] | None, degrees: list[int] | None
) -> Iterator[tuple[str, Deployment]]:
    for model in models or [settings.model]:
        for gpu in gpus or [settings.worker.gpu]:
            for degree in degrees or [settings.worker.tensor_parallel]:
                worker = settings.worker.model_copy(update={"gpu": gpu, "tensor_parallel": degree})
                one = deployment_of(settings.model_copy(update={"model": model, "worker": worker}))
                yield f"{one.model.name} on {degree} x {one.gpu.name}", one


def _plan(
    name: str,
    deployment: Deployment,
    step_time: str,
    work: Workload,
    level: Level,
    claim: Claim | None,
    streams: Sequence[int] | None,
) -> Plan:
    result = Plan(name, deployment.tensor_parallel)
    try:
        capacity = Capacity(deployment, STEP_TIME_MODELS[step_time](deployment), work)
    except CatalogueError as error:
        result.refused = str(error)
        return result
    result.capacity = capacity
    most = min(capacity.max_concurrency, level.max_concurrency)
    if most < 1:
        result.refused = (
            f"{name}: the KV cache holds {capacity.kv_pool_tokens} tokens, less than one request's"
            f" {work.prompt_tokens + work.output_tokens}"
        )
        return result
    result.points = [capacity.point(b) for b in (streams or _with_last(_doubling(most), most)) if b <= most]
    result.peak = max(map(capacity.point, _doubling(most)), key=lambda point: point.total_tokens)
    best = capacity.most_streams(level.max_concurrency, level.ttft, level.tpot)
    if best:
        result.best = capacity.point(best)
        result.held_back_by = _held_back_by(capacity, best, level)
        if level.rate is not None:
            result.num_replicas = replicas_for(level.rate, result.best.requests, level.use)
    if claim is not None:
        result.claim = _answer(capacity, claim, level.max_concurrency)
    return result


def _answer(capacity: Capacity, claim: Claim, max_concurrency: int) -> ClaimAnswer:
    ttft, alone = capacity.ttft(claim.prompt_tokens), 1 / capacity.itl(1)
    streams = capacity.streams_for(claim.tokens_per_second, max_concurrency)
    return ClaimAnswer(
        ttft=ttft,
        ttft_holds=ttft < claim.ttft,
        stream_tokens=alone,
        stream_holds=alone >= claim.tokens_per_second,
        total_streams=streams,
        total_itl=None if streams is None else capacity.itl(streams),
    )


def _held_back_by(capacity: Capacity, best: int, level: Level) -> str:
    if best == capacity.max_concurrency:
        return "KV space"
    return "--max-concurrency" if best == level.max_concurrency else "TPOT"


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


def _claim(text: str) -> Claim | None:
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
        "claim": asdict(one.claim) if one.claim else None,
    }
