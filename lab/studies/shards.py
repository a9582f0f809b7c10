"""Several routers and schedulers that do not talk to one another: what does it cost?

    python -m lab.studies.shards [--out docs/figures] [--seconds 60] [--seeds 3]

Eight H100-SXM serve Llama-3-8B with 200 adapters of rank 16 (power law, exponent 1): under one scheduler, or shared
evenly by two or four, with as many routers. Routers choose a scheduler, schedulers a worker (`least_loaded`). Lengths
are those of Azure's 2023 conversation trace, arrivals are Poisson, and every cluster gets the same requests. A router
knows what each scheduler said last, up to 0.1 s before, and what it has sent there since, which it takes the other
routers to have sent too (`simulator.cluster.ShardChoice`).

*Regret* is what a mean is above that of one router and one scheduler with the same workers and requests. Two rules: by
the adapter alone, and with the bound of `router.max_shard_load`. Writes shards.csv and the figure. Takes about two
minutes.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import lorrery
from lab.studies import figure
from lab.studies.mixed_fleet import NUM_ADAPTERS, workload
from lorrery.service.settings.cluster import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "shards"
GPU, NUM_WORKERS = "H100-SXM", 8
NUMBERS = (2, 4)
RATES = (40, 80, 120)
SECONDS, SEEDS = 60.0, 3
GOAL = 0.05
BOUND = Settings().router.max_shard_load
MEASURES = ("ttft", "ttft_p99", "e2e")


@dataclass(frozen=True, slots=True)
class Row:
    """One cluster at one rate: means over the seeds, times in milliseconds, regrets as shares.

    Attributes:
        number: of routers, and of schedulers.
        bound: `router.max_shard_load`.
        worst_ttft_regret: largest over the seeds, as is `worst_e2e_regret`.
    """

    number: int
    bound: float
    rate: float
    ttft_ms: float
    ttft_p99_ms: float
    e2e_ms: float
    ttft_regret: float
    ttft_p99_regret: float
    e2e_regret: float
    worst_ttft_regret: float
    worst_e2e_regret: float


def settings(bound: float) -> dict[str, Any]:
    """Return the settings of a cluster."""
    return {
        "model": "Llama-3-8B",
        "adapters": {"registry": [{"id": "a", "rank": 16, "count": NUM_ADAPTERS}]},
        "router": {"max_shard_load": bound},
        "scheduler": {
            "policy": "fcfs",
            "placement": "least_loaded",
            "max_req_input_len": 8192,
            "max_req_total_len": 10240,
            "max_num_batched_tokens": 10240,
            "max_waiting_requests": 1_000_000,
        },
        "worker": {"gpu": GPU},
    }


def measure(number: int, bound: float, requests: lorrery.Requests, time_scale: float = 1.0) -> list[float]:
    """Simulate one cluster; return device seconds: mean and 99th percentile to the first token, mean to the last."""
    columns = lorrery.simulate(
        {**settings(bound), "time_scale": time_scale}, requests, workers=NUM_WORKERS, shards=number, routers=number
    ).columns
    assert columns.completed.all()
    first = columns.ttft_seconds
    return [float(first.mean()), float(np.quantile(first, 0.99)), float(columns.e2e_seconds.mean())]


def study(seconds: float = SECONDS, seeds: int = SEEDS, rates: Sequence[float] = RATES) -> list[Row]:
    """Measure every number of schedulers under both rules at every rate."""
    clusters = [(1, BOUND), *((number, bound) for bound in (math.inf, BOUND) for number in NUMBERS)]
    rows: list[Row] = []
    for rate in rates:
        given = [workload(rate, seconds, seed) for seed in range(1, seeds + 1)]
        one = np.array([measure(1, BOUND, requests) for requests in given])
        for number, bound in clusters:
            its = one if number == 1 else np.array([measure(number, bound, requests) for requests in given])
            regret = its / one - 1
            first, last, each = (float(value) * 1e3 for value in its.mean(axis=0))
            more_first, more_last, more_each = (float(value) for value in regret.mean(axis=0))
            worst_first, _, worst_each = (float(value) for value in regret.max(axis=0))
            times = first, last, each
            regrets = more_first, more_last, more_each
            rows.append(Row(number, bound, rate, *times, *regrets, worst_first, worst_each))
    return rows


def draw(rows: Sequence[Row]) -> "Figure":
    """Draw the regret of the TTFT, its 99th percentile and the time to the last token, over the rate."""
    drawn, axes = figure.canvas(1, 3, 3.4)
    titles = ("Time to first token, mean", "Time to first token, p99", "Time to last token, mean")
    for axis, measured, title in zip(axes, MEASURES, titles, strict=True):
        for index, number in enumerate(NUMBERS):
            look = figure.series(index)
            for bound, line in ((BOUND, "-"), (math.inf, ":")):
                its = [row for row in rows if (row.number, row.bound) == (number, bound)]
                rule = f"bound {bound:g}" if bound < math.inf else "adapter alone"
                axis.plot(
                    [row.rate for row in its],
                    [100 * float(getattr(row, f"{measured}_regret")) for row in its],
                    color=look.colour,
                    marker=look.marker,
                    linestyle=line,
                    label=f"{number} routers and schedulers, {rule}",
                )
        axis.axhline(100 * GOAL, color=figure.GREY, linestyle="--")
        axis.set_title(title)
        axis.set_xlabel("requests (1/s)")
        axis.set_yscale("symlog", linthresh=10)
        axis.yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("regret against one (%)")
    figure.legend_above(drawn, axes[0], columns=2)
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    parser = figure.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of requests, simulated")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="workloads at each rate")
    options = parser.parse_args(arguments)
    rows = study(options.seconds, options.seeds)
    figure.write_table(options.out, NAME, map(asdict, rows))
    caption = (
        f"{NUM_WORKERS} {GPU}, Llama-3-8B, {NUM_ADAPTERS} adapters of rank 16, under as many schedulers and routers,"
        f" beside one of each with the same workers and requests; dashed: {100 * GOAL:g} %. Azure's 2023 conversation"
        f" lengths, Poisson arrivals, {options.seconds:g} s, means of {options.seeds} workloads. All simulated."
    )
    figure.save(lambda: draw(rows), options.out, NAME, caption)


if __name__ == "__main__":
    main()
