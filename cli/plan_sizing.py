"""How many replicas a rate needs, by asking the simulator.

Each trial is a run of `lorrery simulate`, and the command that repeats it is part of the answer. Arithmetic gives the
first guess. It knows no queue: what bursts, waiting and the policy's limits cost is in the trials.
"""

import json
import math
import shlex
import tomllib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from lorrery.chassis.errors import SettingsError
from lorrery.chassis.shipped import DEFAULT_SETTINGS
from lorrery.loadgen.options import LoadOptions
from lorrery.settings import Settings, load
from lorrery.simulator.sizing import Trial, Watch, fewest, try_replicas
from lorrery.worker.device.capacity import Point, Workload, replicas_for

LEAST_REQUESTS, MOST_REQUESTS = 1_000, 30_000
SPANS = 10
"""A run of requests for so many E2E times: long enough for a queue that grows to be seen."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Settings in the words of the command line.

    Attributes:
        config: settings file.
        overrides: `KEY=VALUE`, the later ones win.
    """

    config: Path
    overrides: tuple[str, ...] = ()

    def but(self, **values: str | int | None) -> "Cluster":
        """Return it with settings changed; `__` in a name stands for the dot, None leaves a setting as it is."""
        changes = (f"{name.replace('__', '.')}={_toml(value)}" for name, value in values.items() if value is not None)
        return replace(self, overrides=(*self.overrides, *changes))

    def settings(self) -> Settings:
        """Read them.

        Raises:
            SettingsError: as `settings.load`.
        """
        return load(self.config, self.overrides)

    def arguments(self) -> list[str]:
        """Return the options that name them."""
        config = [] if self.config == DEFAULT_SETTINGS else ["--config", str(self.config)]
        return [*config, *(part for override in self.overrides for part in ("--set", override))]


@dataclass(frozen=True, slots=True)
class Sizing:
    """What the simulator said.

    Attributes:
        num_requests: of each trial.
        span_seconds: over which they arrive.
        trials: in the order in which they were made.
        num_replicas: the fewest that met the level; None if none did.
        command: repeats the decisive trial.
    """

    num_requests: int
    span_seconds: float
    trials: list[Trial]
    num_replicas: int | None
    command: str


def size(
    cluster: Cluster,
    work: Workload,
    rate: float,
    at_level: Point,
    ttft: float | None,
    tpot: float | None,
    num_requests: int | None,
    watch: Watch,
) -> Sizing:
    """Find the fewest replicas with which a rate meets a level at p99.

    Args:
        cluster: settings of one deployment.
        work: what each request asks.
        rate: requests per second, Poisson.
        at_level: what one replica serves within the level, by arithmetic.
        ttft: seconds to the first token, waiting included.
        tpot: seconds per further token.
        num_requests: of each trial; None: `SPANS` times those that are under way at once.
        watch: told of each trial.

    Raises:
        SettingsError: requests that the cluster would refuse.
    """
    cluster = _with_adapters(cluster, work)
    settings = cluster.settings()
    _check_lengths(settings, work)
    if num_requests is None:
        num_requests = min(max(math.ceil(SPANS * rate * at_level.e2e), LEAST_REQUESTS), MOST_REQUESTS)
    options = LoadOptions(
        target="",
        rate=rate,
        num_requests=num_requests,
        input_range=(work.prompt_tokens, work.prompt_tokens),
        output_range=(work.output_tokens, work.output_tokens),
        num_adapters=work.num_adapters or None,
        adapter_exponent=0.0 if work.num_adapters else None,
    )

    guess = replicas_for(rate, at_level.requests)
    trials = try_replicas(settings, options, ttft=ttft, tpot=tpot, guess=guess, watch=watch)
    found = fewest(trials)
    arguments = [
        *cluster.arguments(), "--rate", _number(rate), "--input-range", str(work.prompt_tokens), "--output-range",
        str(work.output_tokens), "-n", str(num_requests),
    ]  # fmt: skip
    if work.num_adapters:
        arguments += ["--num-adapters", str(work.num_adapters), "--adapter-exponent", "0"]
    arguments += ["--workers", str(found or trials[-1].num_replicas)]
    return Sizing(num_requests, num_requests / rate, trials, found, f"lorrery simulate {shlex.join(arguments)}")


def _with_adapters(cluster: Cluster, work: Workload) -> Cluster:
    """Let the cluster's adapters be those of the plan, one family for each rank."""
    if not work.num_adapters:
        return cluster
    families = (
        f'{{ id = "plan-r{rank}", rank = {rank}, count = {count} }}'
        for rank, count in Counter(work.adapter_ranks).items()
    )
    return replace(cluster, overrides=(*cluster.overrides, f"adapters.registry=[{', '.join(families)}]"))


def _check_lengths(settings: Settings, work: Workload) -> None:
    own, total = settings.scheduler, work.prompt_tokens + work.output_tokens
    if work.prompt_tokens > own.max_req_input_len:
        raise SettingsError(
            f"--prompt {work.prompt_tokens}: the cluster refuses prompts of more than {own.max_req_input_len} tokens;"
            " raise it with --set scheduler.max_req_input_len=N, or leave out --rate"
        )
    if total > own.max_req_total_len:
        raise SettingsError(
            f"--prompt {work.prompt_tokens} --output {work.output_tokens}: the cluster refuses requests of more than"
            f" {own.max_req_total_len} tokens; raise it with --set scheduler.max_req_total_len=N, or leave out --rate"
        )


def _toml(value: str | int) -> str:
    """Write a value for --set; a string is bare unless TOML would take it for something else."""
    if isinstance(value, int):
        return str(value)
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return value
    return json.dumps(value)


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
