"""Which rule should route LoRA requests? The gateway smg and rules of ours, before live engines and in virtual time.

    python -m lab.studies.referee [--out docs/figures] [--live 3] [--virtual 16] [--seconds 40]

Four engines under vLLM's rules, Llama-3-8B on an L40S each, with four places for adapters on the GPU, sixteen in host
memory, and the others on disk; 64 adapters of rank 64 whose popularity is a power law with exponent 1, Poisson arrivals
at two rates. *Live* they are processes behind smg (`lab.studies.behind_smg`), under its own policies or under a rule of
`lab.studies.routing`. *Virtual* is one simulated cluster of four such workers, with the same rule as its placement and
the same requests. All engines begin without adapters.

Writes referee.csv and the figure, in a minute, with the recorded live runs of data/referee_live.csv. `--live N` records
them anew: N runs of each router and rate, 16 minutes for each N, on an otherwise idle machine (Linux on x86-64) with
smg beside Python: `pip install smg==1.13.0`.
"""

import asyncio
import csv
import itertools
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import lorrery
from lab.studies import figure
from lab.studies.behind_smg import SMG, serve
from lab.studies.routing import RULES, RUNNING
from lorrery.service.local.processes import ForkServer
from lorrery.service.tasks import loop_factory
from lorrery.vocabulary.intervals import student

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "referee"
NUM_ENGINES = 4
RATES = (8.0, 14.0)
SETTINGS = """
format = 1
model = "Llama-3-8B"
engine = "vllm"
worker.gpu = "L40S"
log.level = "error"
scheduler.max_waiting_requests = 100_000
adapters = { max_loras = 4, max_cpu_loras = 16, max_lora_rank = 64, registry = [{ id = "a", rank = 64, count = 64 }] }
"""
GOOD_TTFT_SECONDS, GOOD_TPOT_SECONDS = 0.5, 0.06
ROUTERS = (
    *("smg round_robin", "smg power_of_two", "smg least_load", "smg consistent_hashing"),
    *(rule for rule in RULES if rule != "round_robin"),
)
"""Live. Of smg's policies consistent_hashing gets the adapter as `x-smg-routing-key`; the others see no adapter, and
the default, cache_aware, answers 404 to the name of one. `round_robin` is `smg round_robin` in virtual time."""
RECORDED = Path(__file__).parent / "data" / "referee_live.csv"
"""Figures of live runs, one per line."""

FIGURES = {
    "ttft_p50_ms": "p50 TTFT (ms)",
    "ttft_p99_ms": "p99 TTFT (ms)",
    "good_per_second": "goodput (requests/s)",
    "loads_per_request": "adapter loads per request (number)",
    "fullest": "fullest engine / mean (number)",
    "tokens_per_second": "output (tokens/s)",
    "failed": "failed requests (number)",
}
"""Of a run. The first six are drawn; times are of the requests that completed, and only these can be good."""


def figures_of(columns: lorrery.RequestColumns, num_loads: float, per_engine: Sequence[float]) -> dict[str, float]:
    """Return a run's figures, by the names in `FIGURES`.

    Args:
        columns: of all requests.
        num_loads: loads of adapters onto GPUs.
        per_engine: requests that each engine served.
    """
    done, ttft = columns.completed, columns.ttft_seconds
    seconds = float(columns.end_seconds.max() - columns.arrival_seconds.min())
    good = done & (ttft <= GOOD_TTFT_SECONDS) & (columns.tpot_seconds <= GOOD_TPOT_SECONDS)
    p50, p99 = np.quantile(ttft[done], (0.5, 0.99)) * 1e3
    return {
        "ttft_p50_ms": float(p50),
        "ttft_p99_ms": float(p99),
        "good_per_second": float(good.sum()) / seconds,
        "loads_per_request": num_loads / len(columns),
        "fullest": max(per_engine) * NUM_ENGINES / sum(per_engine),
        "tokens_per_second": float(columns.output_tokens.sum()) / seconds,
        "failed": float((~done).sum()),
    }


def workload(rate: float, seed: int, seconds: float) -> lorrery.LoadOptions:
    """Return the options of a run's requests."""
    return lorrery.LoadOptions(
        rate=rate,
        duration=seconds,
        seed=seed,
        adapters="a-{0..63}",
        input_range=(64, 256),
        output_range=(16, 96),
    )


def virtual(rule: str, rate: float, seed: int, seconds: float) -> dict[str, float]:
    """Simulate a run."""
    RUNNING.by_worker.clear()
    result = lorrery.simulate(
        tomllib.loads(SETTINGS),
        workload(rate, seed, seconds),
        overrides={"scheduler.placement": "lab.studies.routing:Routed", "scheduler.placement_options": {"rule": rule}},
        workers=NUM_ENGINES,
        subscribers=[RUNNING],
    )
    _, per_engine = np.unique(result.columns.worker_id, return_counts=True)
    return figures_of(result.columns, sum(one.num_loads for one in result.adapters.values()), per_engine.tolist())


@dataclass(frozen=True, slots=True)
class Run:
    """One run's figures, by the names in `FIGURES`."""

    router: str
    clock: str
    rate: float
    seed: int
    figures: Mapping[str, float]


def simulated(num_seeds: int, seconds: float) -> Iterator[Run]:
    """Simulate every rule at every rate with as many seeds, from 0."""
    for rate, rule, seed in itertools.product(RATES, RULES, range(num_seeds)):
        yield Run(rule, "virtual", rate, seed, virtual(rule, rate, seed, seconds))


def measured(num_seeds: int, seconds: float) -> Iterator[Run]:
    """Run every router live with the same seeds; all of them with one before the next.

    Raises:
        SystemExit: there is no smg.
    """
    if num_seeds and not SMG.exists():
        raise SystemExit(f"error: no {SMG}; install smg==1.13.0 there, or leave out --live")
    with ForkServer() as fork_server, asyncio.Runner(loop_factory=loop_factory()) as runner:
        for seed, rate, router in itertools.product(range(num_seeds), RATES, ROUTERS):
            asked, chosen = workload(rate, seed, seconds), RULES.get(router, router.removeprefix("smg "))
            served = runner.run(serve(SETTINGS, NUM_ENGINES, chosen, asked, fork_server))
            yield Run(router, "live", rate, seed, figures_of(*served))


def recorded(seconds: float) -> list[Run]:
    """Return the recorded live runs of this length."""
    with RECORDED.open(encoding="utf-8", newline="") as file:
        return [
            Run(row["router"], "live", float(row["rate"]), int(row["seed"]), {one: float(row[one]) for one in FIGURES})
            for row in csv.DictReader(file)
            if float(row["seconds"]) == seconds
        ]


def rows_of(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Return mean and half width of its 95 % interval for each router, rate and figure, live and virtual.

    Of routers that have both, also of the differences between live and virtual runs with the same requests.
    """
    by_seed: dict[tuple[str, float, str], dict[int, Mapping[str, float]]] = {}
    for run in runs:
        by_seed.setdefault((run.router, run.rate, run.clock), {})[run.seed] = run.figures
    rows: list[dict[str, object]] = []
    for (router, rate, clock), found in by_seed.items():
        twin = by_seed.get((router.removeprefix("smg "), rate, "virtual"), {}) if clock == "live" else {}
        for name in FIGURES:
            rows.append(_row(router, rate, clock, name, [one[name] for one in found.values()]))
            if changes := [one[name] - twin[seed][name] for seed, one in found.items() if seed in twin]:
                rows.append(_row(router, rate, "live - virtual", name, changes))
    return rows


def _row(router: str, rate: float, clock: str, name: str, values: Sequence[float]) -> dict[str, object]:
    num, half = len(values), float("nan")
    if num > 1:
        half = student(0.95, num - 1) * float(np.std(values, ddof=1)) / num**0.5
    mean = float(np.mean(values))
    return {"router": router, "rate": rate, "clock": clock, "figure": name, "runs": num, "mean": mean, "half": half}


def draw(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw each figure with its interval by router, at the two rates."""
    drawn, axes = figure.canvas(4, 3, 12.0)
    routers = [*RULES, *(one for one in ROUTERS if one not in RULES)]
    looks = (("virtual", figure.VERMILLION, "s", 0.16), ("live", figure.BLUE, "o", -0.16))
    for at, (rate, name) in enumerate((rate, name) for rate in RATES for name in list(FIGURES)[:6]):
        one = axes[at]
        for clock, colour, marker, beside in looks:
            its = [row for row in rows if (row["rate"], row["figure"], row["clock"]) == (rate, name, clock)]
            one.errorbar(
                [row["mean"] for row in its],
                [routers.index(row["router"]) + beside for row in its],
                xerr=[0.0 if math.isnan(row["half"]) else row["half"] for row in its],
                linestyle="none", marker=marker, markersize=4, color=colour, label=clock,
            )  # fmt: skip
        one.set_yticks(range(len(routers)), routers if at % 3 == 0 else [""] * len(routers))
        one.invert_yaxis()
        one.set_xlabel(FIGURES[name])
        if name.startswith("ttft"):
            one.set_xlim(left=0)
        if name == "ttft_p99_ms":
            one.set_title(f"{rate:g} requests/s")
    figure.legend_above(drawn, axes[0], columns=2)
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    parser = figure.parser(__doc__)
    parser.add_argument("--live", type=int, default=0, help="live runs of each router and rate; 0: the recorded ones")
    parser.add_argument("--virtual", type=int, default=16, help="simulated runs of each")
    parser.add_argument("--seconds", type=float, default=40.0, help="during which requests are sent")
    options = parser.parse_args(arguments)
    runs = []
    for run in itertools.chain(simulated(options.virtual, options.seconds), measured(options.live, options.seconds)):
        runs.append(run)
        print(run.clock, f"{run.rate:g}/s", run.router, run.seed, json.dumps(run.figures), flush=True)
    if options.live:
        lines = [
            {"router": run.router, "rate": run.rate, "seed": run.seed, "seconds": options.seconds, **run.figures}
            for run in runs
            if run.clock == "live"
        ]
        figure.write_table(RECORDED.parent, RECORDED.stem, lines)
    else:
        runs += recorded(options.seconds)
    rows = rows_of(runs)
    figure.write_table(options.out, NAME, rows)
    caption = (
        f"{NUM_ENGINES} engines under vLLM's rules, Llama-3-8B on an L40S each, 4 places for adapters on the GPU and 16"
        f" in host memory, 64 adapters of rank 64, exponent 1; {options.seconds:g} s of Poisson arrivals. Good: first"
        f" token within {GOOD_TTFT_SECONDS * 1e3:g} ms, TPOT at most {GOOD_TPOT_SECONDS * 1e3:g} ms. Mean and 95 %"
        f" interval of live runs behind smg 1.13.0, and of {options.virtual} simulated ones."
    )
    figure.save(lambda: draw(rows), options.out, NAME, caption)


if __name__ == "__main__":
    main()
