"""An H100 beside two L40S: where should requests go?

    python -m lab.studies.mixed_fleet [--out docs/figures] [--seconds 120]

Llama-3-8B with 200 adapters of rank 16 (power law, exponent 1) on one H100-SXM and two L40S under one scheduler; the
policy is first come first served. Prompts and outputs are drawn from the first minute of Azure's 2023 conversation
trace, arrivals are Poisson; every rule gets the same requests. A request is good if its first token comes within 200 ms
and its further ones every 40 ms on average. A GPU's use is the share of the time in which it runs a step.

Step times follow from kernels of both GPUs, timed one by one. The rules, not the GPUs, are what is compared. Writes
mixed_fleet.csv and the figure. Takes about a quarter of a minute.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

import lorrery
from lab.studies import figure
from lorrery.loadgen.workload.popularity import zipf_indices
from lorrery.loadgen.workload.traces import read_requests
from lorrery.scheduler.core.facts import Handler
from lorrery.service.files.reading import open_text
from lorrery.service.files.shipped import TRACES
from lorrery.simulator.loop.worker import StepSpan
from lorrery.vocabulary.units import PS_PER_SECOND

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "mixed_fleet"
FAST, SLOW = "H100-SXM", "L40S"
NUM_SLOW, NUM_ADAPTERS = 2, 200
PLACEMENTS = ("round_robin", "least_loaded", "adapter_hash", "predicted_finish")
RATES = (2, 8, 12, 16, 20)
SECONDS = 120.0
GOOD_TTFT, GOOD_TPOT = 0.2, 0.04


@dataclass(frozen=True, slots=True)
class Row:
    """One run; times in milliseconds, rates per second, and the use of each kind of GPU."""

    placement: str
    rate: float
    num_requests: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    e2e_p50_ms: float
    good_per_second: float
    fast_use: float
    slow_use: float
    fast_share: float


class Busy:
    """Sums the time that workers spend in steps."""

    def __init__(self) -> None:
        self.ps: defaultdict[str, int] = defaultdict(int)

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {StepSpan: self._ran}

    def _ran(self, span: StepSpan, at_ps: int, member: object) -> None:
        """Add the time of these steps."""
        self.ps[span.worker] += span.end_ps - span.start_ps


def workload(rate: float, seconds: float, seed: int = 1) -> lorrery.Requests:
    """Draw the requests for a rate."""
    rng = np.random.default_rng(seed)
    count = max(int(rng.poisson(rate * seconds)), 1)
    with open_text(TRACES["azure"]) as file:
        lengths = [(one.prompt_tokens, one.output_tokens) for one in read_requests(file, 190)]
    prompts, outputs = np.array(lengths)[rng.integers(len(lengths), size=count)].T
    adapters = zipf_indices(NUM_ADAPTERS, count, 1.0, rng)
    return lorrery.Requests(
        at_seconds=np.sort(rng.uniform(0, seconds, count)),
        prompt_tokens=prompts,
        output_tokens=outputs,
        adapter_id=[f"a-{int(one)}" for one in adapters],
    )


def measure(placement: str, rate: float, seconds: float) -> Row:
    """Simulate one run."""
    settings = {
        "model": "Llama-3-8B",
        "adapters": {"registry": [{"id": "a", "rank": 16, "count": NUM_ADAPTERS}]},
        "scheduler": {
            "policy": "fcfs",
            "placement": placement,
            "max_req_input_len": 8192,
            "max_req_total_len": 10240,
            "max_num_batched_tokens": 10240,
            "max_waiting_requests": 1_000_000,
        },
        "workers": [{"gpu": FAST}, {"count": NUM_SLOW, "gpu": SLOW}],
    }
    busy = Busy()
    result = lorrery.simulate(settings, workload(rate, seconds), subscribers=[busy])
    columns = result.columns
    first, each = columns.ttft_seconds, columns.tpot_seconds
    answered = columns.completed
    assert answered.all()
    good = (first <= GOOD_TTFT) & ~(each > GOOD_TPOT)
    end = float(columns.end_seconds.max())
    use = [busy.ps[f"worker-{number}"] / PS_PER_SECOND / end for number in range(1 + NUM_SLOW)]

    def ms(values: "np.typing.NDArray[np.float64]", quantile: float) -> float:
        return float(np.nanquantile(values, quantile)) * 1e3

    return Row(
        placement,
        rate,
        len(first),
        ms(first, 0.5),
        ms(first, 0.99),
        ms(each, 0.5),
        ms(each, 0.99),
        ms(columns.e2e_seconds, 0.5),
        float(good.sum()) / seconds,
        use[0],
        float(np.mean(use[1:])),
        float(np.mean(columns.worker_id == "worker-0")),
    )


def study(seconds: float = SECONDS, rates: Sequence[float] = RATES) -> list[Row]:
    """Measure every rule at every rate."""
    return [measure(placement, rate, seconds) for placement in PLACEMENTS for rate in rates]


def draw(rows: Sequence[Row]) -> "Figure":
    """Draw TTFT, TPOT, goodput and the GPUs' use over the rate."""
    drawn, axes = figure.canvas(2, 2, 7.0)
    first, each, good, use = axes
    for index, placement in enumerate(PLACEMENTS):
        its = [row for row in rows if row.placement == placement]
        rates = [row.rate for row in its]
        look = figure.series(index)
        first.plot(rates, [r.ttft_p99_ms for r in its], color=look.colour, marker=look.marker, label=placement)
        each.plot(rates, [r.tpot_p99_ms for r in its], color=look.colour, marker=look.marker)
        good.plot(rates, [r.good_per_second for r in its], color=look.colour, marker=look.marker)
        use.plot(rates, [100 * r.fast_use for r in its], color=look.colour, marker=look.marker)
        use.plot(rates, [100 * r.slow_use for r in its], color=look.colour, marker=look.marker, linestyle=":")
    rates = sorted({row.rate for row in rows})
    good.plot(rates, rates, color=figure.GREY, linestyle=":")
    for one, title, label in (
        (first, "Time to first token, p99", "p99 TTFT (ms)"),
        (each, "Time per further token, p99", "p99 TPOT (ms)"),
        (good, "Good requests (dotted: all)", "good requests (1/s)"),
        (use, f"Time in steps: {FAST}, and dotted {SLOW}", "time in steps (%)"),
    ):
        one.set_title(title)
        one.set_ylabel(label)
        one.set_xlabel("requests (1/s)")
    first.set_yscale("log")
    first.yaxis.set_major_formatter("{x:,g}")
    for one in (each, good, use):
        one.set_ylim(bottom=0)
    figure.legend_above(drawn, first, columns=4)
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    parser = figure.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of requests")
    options = parser.parse_args(arguments)
    rows = study(options.seconds)
    figure.write_table(options.out, NAME, map(asdict, rows))
    caption = (
        f"One {FAST} and {NUM_SLOW} {SLOW}, Llama-3-8B, {NUM_ADAPTERS} adapters of rank 16, first come first served;"
        f" Azure's 2023 conversation lengths, Poisson arrivals, {options.seconds:g} s. Good: first token within"
        f" {1e3 * GOOD_TTFT:g} ms, further ones every {1e3 * GOOD_TPOT:g} ms. All simulated."
    )
    figure.save(lambda: draw(rows), options.out, NAME, caption)


if __name__ == "__main__":
    main()
