"""A day of chat traffic: what do five autoscaling rules cost, and how many requests do they serve in time?

    python -m lab.studies.autoscaling [--out docs/figures] [--seconds 21600]

Llama-3-8B on A10G, first come first served. Lengths are drawn from the first minute of Azure's 2023 conversation
trace. Its hour has no day in it, and Azure's traces of a week are not in this repository, so the rhythm is made:
Poisson arrivals whose rate is a sine over the day with the peak at 3.3 times the valley (an assumption, about what
DynamoLLM, arXiv:2408.00741, plots of Azure's conversations), and every hour a minute with twice the rate. The day is
pressed into six hours, so that the study takes two minutes: load rises four times as fast as it would.
`--seconds 86400` has all of it. Every rule gets the same requests.

Each rule is tried with several targets, and with a number of workers that stays (the line to beat). GPU hours count
from a worker's start until it has gone. A request is good if its first token comes within 2 s and its further ones
every 50 ms on average. Writes autoscaling.csv and the figure.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import lorrery
from lab.studies import figure
from lorrery.loadgen.workload.traces import read_requests
from lorrery.service.files.reading import open_text
from lorrery.service.files.shipped import TRACES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "autoscaling"
DAY_SECONDS = 21_600.0
"""A whole day compressed into six hours."""
PEAK_TO_VALLEY = 3.3
MEAN_RATE = 1.0
BURST_EVERY, BURST_SECONDS, BURST_FACTOR = 3600.0, 60.0, 2.0
GOOD_TTFT, GOOD_TPOT = 2.0, 0.05
GPU = "A10G"
MOST = 16


@dataclass(frozen=True, slots=True)
class RuleOfStudy:
    """A rule and its targets to try; without a metric: fixed numbers of workers."""

    name: str
    metric: str
    targets: tuple[float, ...]
    also: tuple[tuple[str, float], ...] = ()


RULES = (
    RuleOfStudy("fixed number", "", (2, 3, 4, 6)),
    RuleOfStudy("waiting requests", "num_requests_waiting", (0.1, 0.3, 1)),
    RuleOfStudy("running requests", "num_requests_running", (3, 5, 8)),
    RuleOfStudy("KV cache use", "kv_cache_usage_perc", (0.1, 0.2, 0.4)),
    RuleOfStudy("p90 of TTFT", "time_to_first_token_seconds_p90", (1.0, 1.5, 2.0)),
    RuleOfStudy("tokens/s", "generation_tokens_per_second", (50, 80, 130)),
)
_LOOKS = (6, 0, 1, 2, 3, 5)
"""Plot series of each rule: no two rules share a colour."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run."""

    rule: str
    target: float
    gpu_hours: float
    good_percent: float
    ttft_p99_s: float
    replicas_mean: float
    replicas_max: int
    scalings: int


def rate_at(seconds: "np.typing.NDArray[np.float64]", day_seconds: float) -> "np.typing.NDArray[np.float64]":
    """Return requests per second over the time of day: minimum at midnight, maximum at noon, plus the bursts."""
    swing = (PEAK_TO_VALLEY - 1) / (PEAK_TO_VALLEY + 1)
    wave = 1 - swing * np.cos(2 * np.pi * seconds / day_seconds)
    in_burst = (seconds % BURST_EVERY) >= BURST_EVERY - BURST_SECONDS
    made: np.typing.NDArray[np.float64] = MEAN_RATE * wave * np.where(in_burst, BURST_FACTOR, 1.0)
    return made


def workload(seconds: float, seed: int = 1) -> lorrery.Requests:
    """Draw the requests of a day of `seconds`, by thinning."""
    rng = np.random.default_rng(seed)
    most = 2 * BURST_FACTOR * MEAN_RATE
    at = np.sort(rng.uniform(0, seconds, int(rng.poisson(most * seconds))))
    at = at[rng.uniform(0, most, len(at)) < rate_at(at, seconds)]
    with open_text(TRACES["azure"]) as file:
        lengths = [(one.prompt_tokens, one.output_tokens) for one in read_requests(file, 190)]
    prompts, outputs = np.array(lengths)[rng.integers(len(lengths), size=len(at))].T
    return lorrery.Requests(at_seconds=at, prompt_tokens=prompts, output_tokens=outputs)


def measure(rule: RuleOfStudy, target: float, requests: lorrery.Requests) -> Row:
    """Simulate one run."""
    own: dict[str, Any] = {"enabled": True, "max_replicas": MOST, "ttft_seconds": GOOD_TTFT, "tpot_seconds": GOOD_TPOT}
    workers = 3
    if rule.metric:
        own |= {"metric": rule.metric, "target": target}
    else:
        workers = int(target)
        own |= {"min_replicas": workers, "max_replicas": workers}
    settings = {
        "model": "Llama-3-8B",
        "worker": {"gpu": GPU},
        "scheduler": {
            "policy": "fcfs",
            "max_req_input_len": 8192,
            "max_req_total_len": 10240,
            "max_num_batched_tokens": 10240,
            "max_waiting_requests": 1_000_000,
        },
        "autoscaler": own,
    }
    result = lorrery.simulate(settings, requests, workers=workers)
    assert result.scaling is not None
    scaling = result.scaling.summary
    return Row(
        rule.name,
        target,
        scaling.gpu_hours,
        100 * scaling.good_ratio,
        result.summary.from_intended.ttft_ms.p99 / 1e3,
        scaling.replicas_mean,
        scaling.replicas_max,
        scaling.num_scale_ups + scaling.num_scale_downs,
    )


def study(seconds: float = DAY_SECONDS, rules: Sequence[RuleOfStudy] = RULES) -> list[Row]:
    """Measure every rule with every target."""
    requests = workload(seconds)
    return [measure(rule, target, requests) for rule in rules for target in rule.targets]


def draw(rows: Sequence[Row]) -> "Figure":
    """Draw good requests and the first token's p99 over GPU hours, one line per rule."""
    drawn, axes = figure.canvas(1, 2, 4.4)
    good, first = axes
    for index, rule in enumerate(RULES):
        its = sorted((row for row in rows if row.rule == rule.name), key=lambda row: row.gpu_hours)
        hours = [row.gpu_hours for row in its]
        look = figure.series(_LOOKS[index])
        colour, style = (look.colour, "-") if rule.metric else (figure.GREY, ":")
        for axis, values in (
            (good, [row.good_percent for row in its]),
            (first, [row.ttft_p99_s for row in its]),
        ):
            axis.plot(hours, values, color=colour, marker=look.marker, linestyle=style, label=rule.name)
    for one, title, label in (
        (good, "Requests within the service level", "good requests (%)"),
        (first, "Time to first token, p99", "p99 TTFT (s)"),
    ):
        one.set_title(title)
        one.set_ylabel(label)
        one.set_xlabel("GPU time (hours)")
    first.set_ylim(0, 1.05 * max(row.ttft_p99_s for row in rows))
    figure.legend_above(drawn, good, columns=6)
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    parser = figure.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=DAY_SECONDS, help="that the day takes")
    options = parser.parse_args(arguments)
    rows = study(options.seconds)
    figure.write_table(options.out, NAME, map(asdict, rows))
    caption = (
        f"Llama-3-8B on {GPU}, first come first served; Azure's 2023 conversation lengths, a made day: Poisson,"
        f" {MEAN_RATE:g} request/s on average, peak {PEAK_TO_VALLEY:g} times the valley, a minute of twice the rate"
        f" every hour; the day is pressed into {options.seconds / 3600:g} h."
        f" HPA's rule with its defaults, {MOST} workers at most, a start of 28 s; marks are targets."
        f" Good: first token within {GOOD_TTFT:g} s, further ones every {1e3 * GOOD_TPOT:g} ms. All simulated."
    )
    figure.save(lambda: draw(rows), options.out, NAME, caption)


if __name__ == "__main__":
    main()
