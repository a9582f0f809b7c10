r"""Do the intervals of `lorrery report A B` hold what they promise? Many pairs of runs whose truth is known.

    python -m lab.studies.intervals [--out docs/figures] [--seeds 60] [--seconds 120]

The shipped cluster (two H100-SXM, Llama-3-8B, fcfs) is simulated with many seeds under closed loops of 64 clients and
of 16 (long prompts, one worker), under Poisson arrivals at two rates, in bursts, and faster than it can serve. Each run
is compared with the next four as `lorrery report` does, from its files: all are equal but for the seed, so of the 95 %
intervals one in twenty should have no 0 in it, and half of an interval should be 1.96 standard deviations of the
difference over the pairs. Then every worker is made slower, by 8 % in the closed loop of 64 and by 3 or 5 % in the
others, with the same requests as in a run before: how often is that told, and
how often does the interval miss the mean difference over all such pairs?

Writes intervals.csv and the figure. Takes about ten minutes on one core.
"""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import lorrery
from lab.studies import figure
from lorrery.view.reports.compare import compare
from lorrery.view.reports.requests import Requests, read_requests

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "intervals"
SEEDS, SECONDS = 60, 120
PARTNERS = 4


@dataclass(frozen=True, slots=True)
class Load:
    """A load.

    Attributes:
        options: of the workload.
        slowdown: factor on the step times, to be detected.
        seconds_factor: duration relative to the other loads.
        clients_rate: of a closed loop, number of requests per second of requested duration.
        num_workers: of the cluster.
    """

    name: str
    options: Mapping[str, object]
    slowdown: float
    seconds_factor: float = 1.0
    clients_rate: float = 12.5
    num_workers: int = 2


_LONG_PROMPTS = {"input_tokens": 1024, "output_tokens": 256, "length_ratio": 0.8}
LOADS = (
    Load("64 clients", {"concurrency": 64}, 1.08),
    Load("20 requests/s", {"rate": 20, "adapters": "all"}, 1.03, 2.5),
    Load("40 requests/s", {"rate": 40, "adapters": "all"}, 1.03),
    Load("16 clients, long", {"concurrency": 16, **_LONG_PROMPTS}, 1.05, clients_rate=5.0, num_workers=1),
    Load("30/s, bursts", {"rate": 30, "cv": 3, "adapters": "all"}, 1.05, 1.5),
    Load("90/s, too many", {"rate": 90}, 1.05, 1.2),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A figure under a load; its values are in the report's unit.

    Attributes:
        num_pairs: pairs of equal runs that were compared.
        num_told: how many of them have an interval.
        true_half: 1.96 standard deviations of the difference, over these pairs.
        mean_half: mean half width of the intervals.
        missed_percent: intervals that do not contain 0.
        found_percent: slowdowns that the report detects.
        pair_missed_percent: slowdown intervals that do not contain the mean difference over all slowdowns.
    """

    load: str
    figure: str
    num_pairs: int
    num_told: int
    value: float
    true_half: float
    mean_half: float
    missed_percent: float
    found_percent: float
    pair_missed_percent: float

    @property
    def ratio(self) -> float:
        """Mean half width over the true one; NaN if all runs have the same value."""
        return self.mean_half / self.true_half if self.true_half > 0 else float("nan")


def simulate(load: Load, seed: int, seconds: float, slowdown: float = 1.0) -> Requests:
    """Simulate a run, and read its output files."""
    length = (
        {"num_requests": round(load.clients_rate * seconds)}
        if "concurrency" in load.options
        else {"duration": seconds * load.seconds_factor}
    )
    faults = [f"slow_worker,at=0,worker=worker-{number},factor={slowdown}" for number in range(load.num_workers)]
    result = lorrery.simulate(
        None,
        {**load.options, **length, "seed": seed},
        overrides={"scheduler.policy": "fcfs", "model": "Llama-3-8B", "worker.gpu": "H100-SXM"},
        workers=load.num_workers,
        faults=faults if slowdown != 1.0 else (),
    )
    with tempfile.TemporaryDirectory() as folder:
        result.write(folder)
        return read_requests(Path(folder) / "requests.csv", [])


def measure(load: Load, seeds: int, seconds: float) -> list[Row]:
    """Compare equal runs, and a third of the runs with slower ones."""
    runs = [simulate(load, seed, seconds) for seed in range(seeds)]
    equal = _compared((runs[at], runs[(at + by) % seeds]) for by in range(1, PARTNERS + 1) for at in range(seeds))
    slower = _compared(
        (run, simulate(load, seed, seconds, load.slowdown)) for seed, run in enumerate(runs[: max(2, seeds // 3)])
    )
    rows = []
    for name, values in equal.items():
        base, change, low, high = values.T
        told = np.isfinite(low)
        _, changes, lows, highs = slower[name].T
        truth = float(changes.mean())
        rows.append(
            Row(
                load.name,
                name,
                len(values),
                int(told.sum()),
                float(base.mean()),
                1.96 * float(change.std()),
                float(((high - low) / 2)[told].mean()) if told.any() else float("nan"),
                100 * float(((low > 0) | (high < 0))[told].mean()) if told.any() else float("nan"),
                100 * float(((lows > 0) | (highs < 0)).mean()),
                100 * float(((lows > truth) | (highs < truth))[np.isfinite(lows)].mean()) if told.any() else np.nan,
            )
        )
    return rows


def _compared(
    pairs: Iterable[tuple[Requests, Requests]],
) -> dict[str, "np.ndarray[tuple[int, int], np.dtype[np.float64]]"]:
    """Compare pairs; for each figure return rows of the first value, the difference, and its interval."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for base, other in pairs:
        for one in compare(base, other).differences:
            found.setdefault(one.name, []).append((one.base, one.other - one.base, one.low, one.high))
    return {name: np.array(rows) for name, rows in found.items()}


def draw(rows: Sequence[Row]) -> "Figure":
    """Draw the share of intervals that miss 0, and their width."""
    drawn, axes = figure.canvas(1, 2, 11.0)
    names = list(dict.fromkeys(row.figure for row in rows))
    colours = (figure.BLUE, figure.SKY, figure.GREEN, figure.VERMILLION, figure.GREY, figure.BLACK)
    panels = (
        ("Equal runs: intervals without 0", "intervals that miss 0 (%)", "missed_percent", ".1f", 5.0),
        ("Half width over the true one", "half width / 1.96 sd (number)", "ratio", ".2f", 1.0),
    )
    for one, (title, label, attribute, form, aim) in zip(axes, panels, strict=True):
        groups = [
            figure.Bars(
                load.name,
                colour,
                [
                    next(
                        (getattr(row, attribute) for row in rows if (row.load, row.figure) == (load.name, name)), np.nan
                    )
                    for name in names
                ],
            )
            for load, colour in zip(LOADS, colours, strict=True)
        ]
        one.axvline(aim, color=figure.BLACK, linestyle=":", label="as promised", zorder=figure.BEHIND_BARS)
        figure.bars(one, names, groups, form)
        one.set_title(title)
        one.set_xlabel(label)
        one.set_ylabel("")
    figure.legend_above(drawn, axes[0], columns=4)
    return drawn


CAPTION = """\
Two H100-SXM, Llama-3-8B, fcfs, simulated; pairs of runs that differ in their seed alone, compared as `lorrery report` \
compares them. Of 95 % intervals one in twenty misses 0 if they are right; the pairs share runs, so a share of 5 % is \
known to some 2.5 %."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    parser = figure.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs under each load; 6 at least")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that a run takes, about")
    options = parser.parse_args(arguments)
    if options.seeds <= PARTNERS + 1:
        parser.error(f"--seeds {options.seeds}: each run is compared with the next {PARTNERS}; give 6 or more")
    rows = [row for load in LOADS for row in measure(load, options.seeds, options.seconds)]
    print(
        f"{'load':17} {'figure':16} {'value':>9} {'true half':>10} {'half width':>10} {'ratio':>6} {'miss 0':>7} found"
        f" {'pairs miss':>10}"
    )
    for row in rows:
        print(
            f"{row.load:17} {row.figure:16} {row.value:9.4g} {row.true_half:10.3g} {row.mean_half:10.3g}"
            f" {row.ratio:6.2f} {row.missed_percent:6.1f}% {row.found_percent:4.0f}%"
            f" {row.pair_missed_percent:9.1f}%"
        )
    figure.write_table(
        options.out,
        NAME,
        [
            {
                "load": row.load,
                "figure": row.figure,
                "pairs": row.num_pairs,
                "with_interval": row.num_told,
                "value": row.value,
                "true_half": row.true_half,
                "mean_half": row.mean_half,
                "ratio": row.ratio,
                "missed_percent": row.missed_percent,
                "found_percent": row.found_percent,
                "pair_missed_percent": row.pair_missed_percent,
            }
            for row in rows
        ],
    )
    figure.save(lambda: draw(rows), options.out, NAME, CAPTION)


if __name__ == "__main__":
    main()
