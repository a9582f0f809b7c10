"""When does affinity beat load? Placements by number of adapters, skew and load.

    python -m lab.studies.affinity [--out docs/figures] [--requests 2000] [--placements least_loaded weighted ...]

Llama-3-8B on eight H100 under vLLM's rules with eight places for adapters each (`adapters.max_loras`), adapters of rank
64: a request whose adapter finds no place is passed over, without a bound. Prompts of 64 to 192 tokens, outputs of 32
to 96, Poisson arrivals; every rule gets the same requests. Workers begin with all adapters on disk; four times as many
as places fit into a worker's host memory.
Above: popularity is a power law with exponent 1, and the number of adapters grows. Below: there are 256 adapters, and
the exponent grows. Left a low rate, right a high one.

Writes affinity.csv and the figure. Takes about two minutes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

import lorrery
from lab.studies import figure
from lorrery.loadgen.workload.popularity import zipf_indices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "affinity"
NUM_WORKERS, NUM_PLACES = 8, 8
PLACEMENTS = ("least_loaded", "power_of_two", "adapter_hash", "adapter_shards", "weighted")
RATES = (80.0, 320.0)
ADAPTERS = (16, 64, 256, 1024)
EXPONENTS = (0.0, 0.5, 1.0, 1.5, 2.0)
SOME_ADAPTERS, SOME_EXPONENT = 256, 1.0
NUM_REQUESTS = 2000


@dataclass(frozen=True, slots=True)
class Row:
    """One run; times in milliseconds.

    Attributes:
        loading_share: share of requests whose first token waited for an adapter load.
        fullest: requests of the worker with the most, relative to the mean.
    """

    placement: str
    rate: float
    num_adapters: int
    exponent: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    loading_share: float
    fullest: float


def workload(rate: float, num_adapters: int, exponent: float, count: int) -> lorrery.Requests:
    """Draw the requests of a run."""
    rng = np.random.default_rng(1)
    return lorrery.Requests(
        at_seconds=np.cumsum(rng.exponential(1 / rate, count)),
        prompt_tokens=rng.integers(64, 193, count),
        output_tokens=rng.integers(32, 97, count),
        adapter_id=[f"a-{int(one)}" for one in zipf_indices(num_adapters, count, exponent, rng)],
    )


def measure(placement: str, rate: float, num_adapters: int, exponent: float, count: int) -> Row:
    """Simulate one run."""
    settings = {
        "model": "Llama-3-8B",
        "engine": "vllm",
        "adapters": {
            "registry": [{"id": "a", "rank": 64, "count": num_adapters}],
            "max_loras": NUM_PLACES,
            "max_cpu_loras": 4 * NUM_PLACES,
        },
        "scheduler": {"placement": placement, "max_waiting_requests": 1_000_000},
        "workers": [{"gpu": "H100-SXM", "count": NUM_WORKERS}],
    }
    columns = lorrery.simulate(settings, workload(rate, num_adapters, exponent, count)).columns
    assert columns.completed.all()
    p50, p99 = np.quantile(columns.ttft_seconds, (0.5, 0.99)) * 1e3
    _, per_worker = np.unique(columns.worker_id, return_counts=True)
    return Row(
        placement,
        rate,
        num_adapters,
        exponent,
        float(p50),
        float(p99),
        float(np.nanmedian(columns.tpot_seconds)) * 1e3,
        float(np.mean(columns.adapter_load_seconds > 0)),
        float(per_worker.max() / (count / NUM_WORKERS)),
    )


def study(count: int = NUM_REQUESTS, placements: Sequence[str] = PLACEMENTS) -> list[Row]:
    """Measure each rule, by number of adapters and by skew."""
    ways = dict.fromkeys(
        [(number, SOME_EXPONENT) for number in ADAPTERS] + [(SOME_ADAPTERS, exponent) for exponent in EXPONENTS]
    )
    return [measure(one, rate, *way, count) for one in placements for rate in RATES for way in ways]


def _label_some(value: float, _position: float) -> str:
    return f"{value:,g}" if f"{value:g}"[0] in "25" else ""


def draw(rows: Sequence[Row]) -> "Figure":
    """Draw p99 TTFT over the number of adapters, and over the exponent, at each rate."""
    drawn, axes = figure.canvas(2, 2, 7.0)
    for column, rate in enumerate(RATES):
        over_number, over_exponent = axes[column], axes[2 + column]
        for index, placement in enumerate(PLACEMENTS):
            its = [row for row in rows if row.placement == placement and row.rate == rate]
            look = figure.series(index)
            by_number = [row for row in its if row.exponent == SOME_EXPONENT]
            by_number.sort(key=lambda row: row.num_adapters)
            by_exponent = [row for row in its if row.num_adapters == SOME_ADAPTERS]
            by_exponent.sort(key=lambda row: row.exponent)
            over_number.plot(
                [row.num_adapters / (NUM_WORKERS * NUM_PLACES) for row in by_number],
                [row.ttft_p99_ms for row in by_number],
                color=look.colour, marker=look.marker, label=placement,
            )  # fmt: skip
            over_exponent.plot(
                [row.exponent for row in by_exponent],
                [row.ttft_p99_ms for row in by_exponent],
                color=look.colour, marker=look.marker,
            )  # fmt: skip
        over_number.set_xscale("log", base=2)
        over_number.xaxis.set_major_formatter("{x:g}")
        over_number.set_title(f"{rate:g} requests/s, exponent {SOME_EXPONENT:g}")
        over_number.set_xlabel("adapters beside places on all GPUs (number)")
        over_exponent.set_title(f"{rate:g} requests/s, {SOME_ADAPTERS} adapters")
        over_exponent.set_xlabel("exponent of the adapters' popularity (number)")
        for one in (over_number, over_exponent):
            one.set_yscale("log")
            one.yaxis.set_major_formatter("{x:,g}")
            one.yaxis.set_minor_formatter(_label_some)
            one.set_ylabel("p99 TTFT (ms)")
    figure.legend_above(drawn, axes[0], columns=5)
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    parser = figure.parser(__doc__)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="of each run")
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=PLACEMENTS, help="to compare")
    options = parser.parse_args(arguments)
    rows = study(options.requests, options.placements)
    figure.write_table(options.out, NAME, map(asdict, rows))
    caption = (
        f"{NUM_WORKERS} H100, Llama-3-8B, {NUM_PLACES} places for adapters of rank 64 on each and {4 * NUM_PLACES} in"
        f" its host's memory, the others on disk; {options.requests:,} requests a run, prompts of 64 to 192 tokens,"
        " answers of 32 to 96, Poisson arrivals. All simulated."
    )
    figure.save(lambda: draw(rows), options.out, NAME, caption)


if __name__ == "__main__":
    main()
