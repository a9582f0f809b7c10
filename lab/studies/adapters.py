r"""S-LoRA's figures: throughput over the number of adapters, skew and bursts; and what other policies make of them.

    python -m lab.studies.adapters [--duration 300] [--out docs/figures]

The setting of the paper's A10G experiments: Llama-2-7B, prompts and outputs of 8 to 511 tokens, 300 s of its own
generator's requests (checked draw for draw), a KV pool of 14,500 tokens, its queue and loop with their quirks
(`req_queue`, `strict`). S1 has adapters of rank 8; S2 of ranks 64, 32, 16 and 8 in turn. Where its repository publishes
a measured run of the same workload, that stands beside ours (lab/studies/data/slora_a10g.csv).

One point is

    lorrery simulate --config /dev/null --workers 1 --workload slora --rate 2.5 --duration 300 --timeout 1000000 \
      --num-adapters N --adapter-dirs r64,r32,r16,r8 \
      --set 'adapters.registry=[{id="r64",rank=64,count=500}, ...]' \
      --set model=Llama-2-7B --set worker.gpu=A10G --set scheduler.strict=true \
      --set scheduler.max_total_token_num=14500

Writes adapters.csv, and the figures adapters and adapters_policies. Takes about half a minute.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

import lorrery
from lab.studies import figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "adapters"
RANKS = {"S1": (8,), "S2": (64, 32, 16, 8)}
POOL_TOKENS = 14_500
ENGINE = "s-lora-a10g"
COUNTS = (0, 1, 5, 20, 50, 100, 200, 500, 1_000, 2_000)
ALPHAS = (0.1, 0.3, 0.6, 0.8, 1.0)
CVS = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0)
SATURATED_RATE, RATE, MANY = 2.5, 2.0, 200
DURATION_SECONDS = 300.0
_TIMEOUT_SECONDS = 1e6

_CHUNKED = {"policy": "fcfs", "batching": "chunked", "memory": "paged", "max_num_batched_tokens": 2_048}


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy to compare: its name in the figure, and its settings."""

    legend: str
    scheduler: Mapping[str, Any]
    adapters: Mapping[str, Any] = field(default_factory=dict)


SLORA = "slora"
POLICIES = {
    SLORA: Policy("req_queue (S-LoRA): any number of adapters", {"policy": "req_queue", "strict": True}),
    "cluster_soft": Policy(
        "cluster, S-LoRA's soft limit of 8 adapters",
        {"policy": "cluster", "batch_num_adapters": 8, "strict": True},
    ),
    "cluster_hard": Policy(
        "cluster, at most 8: others overtake who waits", {"policy": "cluster", "batch_num_adapters": 8}
    ),
    "fcfs": Policy("fcfs, chunked: any number", _CHUNKED),
    "fcfs_max_loras": Policy(
        "fcfs, chunked, max_loras = 8: nobody overtakes",
        _CHUNKED,
        {"max_loras": 8, "max_overtakes": 0, "look_ahead": 0},
    ),
    "peft": Policy("peft: one adapter at a time", {"policy": "peft", "strict": True}),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One run: its parameters, its results, and the measured results of the same workload, if any."""

    sweep: str
    setting: str
    policy: str
    num_adapters: int
    req_rate: float
    alpha: float = 1.0
    cv: float = 1.0
    throughput: float = np.nan
    first_token_s: float = np.nan
    latency_s: float = np.nan
    measured_throughput: float = np.nan
    measured_first_token_s: float = np.nan


def measure(point: Point, duration: float) -> Point:
    """Run a point; return it with S-LoRA's figures (seconds, means over completed requests)."""
    ranks = RANKS[point.setting]
    policy = POLICIES[point.policy]
    each = point.num_adapters // len(ranks) + 1
    registry = [{"id": f"r{rank}", "rank": rank, "count": each} for rank in ranks]
    settings = {
        "model": "Llama-2-7B",
        "adapters": {"registry": registry, **policy.adapters},
        "scheduler": {"max_total_token_num": POOL_TOKENS, **policy.scheduler},
        "worker": {"gpu": "A10G", "engine": ENGINE},
    }
    load = lorrery.LoadOptions(
        workload="slora",
        rate=point.req_rate,
        duration=duration,
        num_adapters=point.num_adapters,
        adapter_dirs=",".join(f"r{rank}" for rank in ranks) if point.num_adapters else None,
        alpha=point.alpha,
        cv=point.cv,
        timeout=_TIMEOUT_SECONDS,
    )
    summary = lorrery.simulate(settings, load, workers=1).report.slora
    assert summary.num_abort == 0
    return replace(
        point,
        throughput=summary.throughput or np.nan,
        first_token_s=summary.avg_first_token_latency or np.nan,
        latency_s=summary.avg_latency or np.nan,
    )


def study(
    duration: float = DURATION_SECONDS,
    counts: Sequence[int] = COUNTS,
    alphas: Sequence[float] = ALPHAS,
    cvs: Sequence[float] = CVS,
) -> list[Point]:
    """Run every sweep."""
    asked: list[Point] = []
    for setting in RANKS:
        asked += [Point("adapters", setting, SLORA, count, SATURATED_RATE) for count in counts]
        asked += [Point("skew", setting, SLORA, MANY, RATE, alpha=alpha) for alpha in alphas]
        asked += [Point("bursts", setting, SLORA, MANY, RATE, cv=cv) for cv in cvs]
    for policy in POLICIES:
        if policy != SLORA:  # its line is the sweep above
            asked += [Point("adapters", "S2", policy, count, SATURATED_RATE) for count in counts if count]
    published = read_published() if duration == DURATION_SECONDS else {}
    return [measure(_with_published(point, published), duration) for point in asked]


Key = tuple[str, int, float, float, float]
Published = dict[Key, tuple[float, float]]


def read_published() -> Published:
    """Return measured runs: (setting, adapters, rate, alpha, cv) -> (throughput, mean first-token time).

    Of several runs with the same key, one that its authors do not call a backup, and of those the first.
    """
    text = (resources.files("lab.studies") / "data" / "slora_a10g.csv").read_text(encoding="utf-8")
    lines = list(csv.DictReader(text.splitlines()))
    found: Published = {}
    for line in sorted(lines, key=lambda line: line["flags"] == "backup"):
        load = float(line["req_rate"]), float(line["alpha"]), float(line["cv"])
        result = float(line["throughput"]), float(line["avg_first_token_latency"])
        found.setdefault((line["setting"], int(line["num_adapters"]), *load), result)
    return found


def _with_published(point: Point, published: Published) -> Point:
    key = point.setting, point.num_adapters, point.req_rate, point.alpha, point.cv
    if point.policy != SLORA or key not in published:
        return point
    throughput, first_token_s = published[key]
    return replace(point, measured_throughput=throughput, measured_first_token_s=first_token_s)


_SWEEPS: Mapping[str, tuple[str, str, Callable[[Point], float]]] = {
    "adapters": (f"adapters, at {SATURATED_RATE} requests/s", "number of adapters", lambda p: p.num_adapters),
    "skew": (
        f"skew, {MANY} adapters, {RATE:g} requests/s",
        "alpha (1: all alike; 0.1: 59 % ask for one)",
        lambda p: p.alpha,
    ),
    "bursts": (
        f"bursts, {MANY} adapters, {RATE:g} requests/s",
        "coefficient of variation of the gaps (1: Poisson)",
        lambda p: p.cv,
    ),
}


def draw(points: Sequence[Point]) -> "Figure":
    """Draw the three sweeps under S-LoRA's policy: throughput on the left, first-token time on the right."""
    drawn, axes = figure.canvas(3, 2, 8.2)
    for row, (sweep, (title, label, of)) in enumerate(_SWEEPS.items()):
        left, right = axes[2 * row : 2 * row + 2]
        its = [point for point in points if point.sweep == sweep and point.policy == SLORA]
        places = {value: place for place, value in enumerate(sorted({of(point) for point in its}))}
        for index, setting in enumerate(RANKS):
            line = [point for point in its if point.setting == setting]
            x = [places[of(point)] for point in line]
            look = figure.series(index)
            for one, ours, theirs in (
                (left, [p.throughput for p in line], [p.measured_throughput for p in line]),
                (right, [p.first_token_s for p in line], [p.measured_first_token_s for p in line]),
            ):
                one.plot(x, ours, color=look.colour, marker=look.marker, label=f"{setting}, Lorrery")
                figure.published(one, x, theirs, look, f"{setting}, measured", 9)
        for one in (left, right):
            one.set_xticks(list(places.values()), [_short(value) for value in places])
            one.set_xlabel(label)
            one.set_title(f"Over {title}" if one is left else "")
        left.set_ylim(0, 2.25)
        left.set_ylabel("throughput (requests/s)")
        right.set_ylim(bottom=0)
        right.set_ylabel("mean time to first token (s)")
    figure.legend_above(drawn, axes[0], columns=4)
    return drawn


def _short(value: float) -> str:
    return f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}"


def draw_policies(points: Sequence[Point]) -> "Figure":
    """Draw throughput and first-token time over the number of adapters, one line per policy."""
    drawn, axes = figure.canvas(1, 2, 4.4)
    for index, (name, policy) in enumerate(POLICIES.items()):
        of_policy = [p for p in points if p.policy == name and p.sweep == "adapters" and p.setting == "S2"]
        line = [point for point in of_policy if point.num_adapters]
        x = range(len(line))
        look = figure.series(index)
        for one, y in zip(axes, ([p.throughput for p in line], [p.first_token_s for p in line]), strict=True):
            one.plot(x, y, color=look.colour, marker=look.marker, label=policy.legend)
            one.set_xticks(x, [_short(point.num_adapters) for point in line])
    for one in axes:
        one.set_xlabel("number of adapters")
    axes[0].set_title("Throughput")
    axes[0].set_ylabel("throughput (requests/s)")
    axes[0].set_ylim(0, 2.05)
    axes[1].set_title("Mean time to first token")
    axes[1].set_ylabel("mean time to first token (s)")
    axes[1].set_yscale("log")
    axes[1].yaxis.set_major_formatter("{x:,g}")
    figure.legend_above(drawn, axes[0], columns=2)
    return drawn


SOURCE = """\
One A10G, Llama-2-7B, pool of 14,500 tokens, {duration:g} s of S-LoRA's generator; prompts and outputs of 8 to 511 \
tokens. """


def captions(points: Sequence[Point], duration: float) -> tuple[str, str]:
    """Return the two figures' captions."""
    source = SOURCE.format(duration=duration)
    errors = [abs(p.throughput / p.measured_throughput - 1) for p in points if np.isfinite(p.measured_throughput)]
    first = (
        f"{source}S1: adapters of rank 8; S2: of ranks 64, 32, 16, 8 in turn. Policy req_queue, strict; engine"
        f" {ENGINE}, fitted to these and other runs. "
    )
    if errors:
        first += (
            "Hollow marks: measured, from the S-LoRA repository (c1ddf48); of the skew those that its authors call"
            " backups. One draw each, the original's: with bursts the draw decides. Throughput differs by"
            f" {100 * float(np.median(errors)):.1f} % in the median and {100 * max(errors):.1f} % at most."
        )
    second = (
        f"{source}Adapters of ranks 64, 32, 16, 8 in turn. {SATURATED_RATE} requests/s, more than one A10G serves. All"
        " simulated. The two fcfs lines have vLLM's batching and memory (chunks of 2,048 tokens, paged), but vLLM"
        " itself lets others pass a request whose adapter has no place."
    )
    return first, second


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    parser = figure.parser(__doc__)
    parser.add_argument("--duration", type=float, default=DURATION_SECONDS, help="seconds of requests")
    options = parser.parse_args(arguments)
    points = study(options.duration)
    first, second = captions(points, options.duration)
    figure.write_table(options.out, NAME, map(asdict, points))
    figure.save(lambda: draw(points), options.out, NAME, first)
    figure.save(lambda: draw_policies(points), options.out, f"{NAME}_policies", second)


if __name__ == "__main__":
    main()
