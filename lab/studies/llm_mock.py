"""llm-mock's two charts: what its prefix cache and its batch size do to throughput, TTFT and TPOT.

    python -m lab.studies.llm_mock [--draws 40] [--out docs/figures]

Seed document 001's benchmark: 50 prompts at once, a cache built from 5,000 other prompts and cut to 0, 500, 1,000 or
5,000 entries, batch size 10 or 20; its engine's batching, step-time formula, static trie and output lengths are all in
this tree (`llm_mock`, `llm-mock`, `static_trie`). `lab.studies.corpus` stands for ShareGPT. The original is one run of
each setting; here 40 draws of 50 prompts show how much of a difference is the draw. A gain compares a draw with itself.
TPOT is given twice: as the original has it, E2E over the GPT-2 tokens of its text (" #0 #1 ..." is two a token, and E2E
contains the queueing), and as the field has it, (E2E - TTFT) / (output tokens - 1).

Writes llm_mock.csv, and the figures llm_mock_cache (its first chart) and llm_mock_batch (its second). Takes some
seven seconds.
"""

import csv
from collections.abc import Callable, Sequence
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from lab.studies import figure
from lab.studies.llm_mock_benchmark import (
    BATCH_SIZES,
    CACHE_SIZES,
    CORPUS_PROMPTS,
    DRAWS,
    Floats,
    Metrics,
    Point,
    study,
    tpot,
    tpot_gpt2,
    ttft,
)
from lorrery.view.plots import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "llm_mock"


def read_original() -> dict[tuple[str, int, int], float]:
    """Return the values of the original's charts: (series, batch size, cache entries) -> value, in the chart's unit."""
    text = (resources.files("lab.studies") / "data" / "llmmock_readme_charts.csv").read_text(encoding="utf-8")
    return {
        (line["series"], int(line["batch_size"]), int(line["cache_entries"])): float(line["value"])
        for line in csv.DictReader(text.splitlines())
    }


Original = dict[tuple[str, int, int], float]


def _of(points: Sequence[Point], batch_size: int) -> list[Point]:
    return [point for point in points if point.batch_size == batch_size and not point.system_tokens]


def _band(axes: "Axes", values: Sequence[Floats], look: Series, label: str) -> None:
    """Draw medians as a line, and the middle 80 % of the draws around it."""
    x = range(len(values))
    low, middle, high = (np.array([np.percentile(one, percent) for one in values]) for percent in (10, 50, 90))
    axes.fill_between(x, low, high, color=look.colour, alpha=0.15, linewidth=0)
    axes.plot(x, middle, color=look.colour, marker=look.marker, label=label)


def _cache_axis(axes: "Axes", label: str, title: str) -> None:
    axes.set_xticks(range(len(CACHE_SIZES)), [f"{size:,}" for size in CACHE_SIZES])
    axes.set_xlabel("cache size (tokens kept of the trie)")
    axes.set_ylabel(label)
    axes.set_title(title)


def draw_cache(points: Sequence[Point], original: Original) -> "Figure":
    """Draw the first chart: throughput, hit length, TTFT and TPOT over cache size, batch size 10."""
    drawn, axes = figure.canvas(2, 2, 6.4)
    chosen = _of(points, 10)
    panels: list[tuple[str, str, Callable[[Metrics], float], str, float]] = [
        ("Throughput", "throughput (requests/s)", lambda run: run.throughput, "request_throughput", 1.0),
        (
            "Hit length: cached tokens of a prompt",
            "hit length (tokens)",
            lambda run: run.hit_tokens,
            "avg_cache_hit_length",
            1.0,
        ),
        ("P99 TTFT", "P99 TTFT (s)", ttft, "p99_ttft", 1e-3),
        ("P99 TPOT, the original's: E2E / GPT-2 tokens", "P99 TPOT (ms)", tpot_gpt2, "p99_tpot", 1.0),
    ]
    for one, (title, label, of, series, scale) in zip(axes, panels, strict=True):
        draws = [point.values(of) for point in chosen]
        _band(one, draws, figure.series(0), "Lorrery: median and middle 80 % of the draws")
        theirs = [scale * original[series, 10, size] for size in CACHE_SIZES]
        figure.published(one, range(len(CACHE_SIZES)), theirs, figure.series(1), "llm-mock's chart")
        _cache_axis(one, label, title)
        one.set_ylim(bottom=0)
    figure.legend_above(drawn, axes[0], columns=2)
    return drawn


def draw_batch(points: Sequence[Point], original: Original) -> "Figure":
    """Draw the second chart: TTFT and TPOT of two batch sizes, the cache's gain in each, and its explanation."""
    drawn, axes = figure.canvas(3, 2, 8.8)
    x = range(len(CACHE_SIZES))
    for index, batch_size in enumerate(BATCH_SIZES):
        look = figure.series(index)
        its = _of(points, batch_size)
        ours = f"Lorrery, b = {batch_size}"
        chart = f"llm-mock's chart, b = {batch_size}"
        _band(axes[0], [point.values(ttft) for point in its], look, ours)
        theirs = [original["p99_ttft", batch_size, size] / 1e3 for size in CACHE_SIZES]
        figure.published(axes[0], x, theirs, look, chart)
        _band(axes[1], [point.values(tpot_gpt2) for point in its], look, "")
        field = [float(np.median(point.values(tpot))) for point in its]
        axes[1].plot(x, field, "--", color=look.colour)
        axes[1].annotate(
            "dashed: (E2E - TTFT) / (n - 1)" if index else "dashed",
            (x[0], field[0]), xytext=(0, 4), textcoords="offset points", fontsize=8, color=look.colour,
        )  # fmt: skip
        for one, of, series in ((axes[2], ttft, "p99_ttft_improvement"), (axes[3], tpot_gpt2, "p99_tpot_improvement")):
            _band(one, [100 * point.gains(of) for point in its], look, ours)
            theirs = [100 * original[series, batch_size, size] for size in CACHE_SIZES[1:]]
            figure.published(one, x[1:], theirs, look, chart)
    _cache_axis(axes[0], "P99 TTFT (s)", "P99 TTFT: worse with larger batches")
    _cache_axis(axes[1], "P99 TPOT (ms)", "P99 TPOT, E2E / GPT-2 tokens: worse too")
    _cache_axis(axes[2], "% less than without a cache", "Gain in P99 TTFT")
    _cache_axis(axes[3], "% less than without a cache", "Gain in P99 TPOT (E2E / GPT-2 tokens)")
    for one in axes[:2]:
        one.set_ylim(bottom=0)
        one.yaxis.set_major_formatter("{x:,g}")
    _draw_ratios(axes[4], points, original)
    _draw_needed(axes[5], points, original)
    figure.legend_above(drawn, axes[0], columns=4)
    return drawn


def _batch_ratio(points: Sequence[Point]) -> Floats:
    """Return the P99 TTFT of b = 20 over that of b = 10, for each draw, without a cache."""
    ten, twenty = _of(points, 10)[0], _of(points, 20)[0]
    return twenty.values(ttft) / ten.values(ttft)


def _draw_ratios(axes: "Axes", points: Sequence[Point], original: Original) -> None:
    ratios = _batch_ratio(points)
    bins = np.arange(1.0, max(2.2, float(ratios.max()) + 0.1), 0.1).tolist()
    counts, _, _ = axes.hist(ratios, bins=bins, color=figure.PALE)
    theirs = original["p99_ttft", 20, 0] / original["p99_ttft", 10, 0]
    axes.axvline(theirs, color=figure.VERMILLION, linestyle="--", label=f"llm-mock's chart, {theirs:.2f}")
    axes.axvline(1.0, color=figure.BLACK, linestyle=":", label="no difference")
    axes.set_xlim(0.9, None)
    axes.set_ylim(0, 1.45 * float(max(counts)))  # room for the legend
    axes.set_xlabel("P99 TTFT of b = 20 over that of b = 10 (ratio)")
    axes.set_ylabel("draws of 50 prompts (number)")
    axes.locator_params(axis="y", integer=True)
    axes.set_title("How much worse, no cache: by draw")
    axes.legend(loc="upper right")


def _draw_needed(axes: "Axes", points: Sequence[Point], original: Original) -> None:
    chosen = [p for p in points if p.batch_size == 10 and p.cache_size == CACHE_SIZES[-1]]
    hits = [float(np.median(point.values(lambda run: run.hit_tokens))) for point in chosen]
    gains = [100 * float(np.median(point.gains(ttft))) for point in chosen]
    look = figure.series(0)
    axes.plot(hits, gains, color=look.colour, marker=look.marker)
    theirs = original["avg_cache_hit_length", 10, 5_000], 100 * original["p99_ttft_improvement", 10, 5_000]
    figure.published(axes, [theirs[0]], [theirs[1]], look, "")
    axes.set_xscale("log")
    axes.set_xticks([1, 3, 10, 30, 100, 300], ["1", "3", "10", "30", "100", "300"])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("hit length (tokens), by ever longer system prompts")
    axes.set_ylabel("% less than without a cache")
    axes.set_title("Gain in P99 TTFT over hit length")


SOURCE = """\
llm-mock's engine, which names neither model nor GPU: step time b x longest x most new / 468,000 + 0.06 s. {draws} \
draws of 50 prompts at once (bands: the middle 80 %); a synthetic corpus stands for ShareGPT (lognormal lengths of \
median 100 and mean 167 tokens, openings by Zipf's law: lab/studies/corpus.py). Hollow marks: read off the README's \
charts of dongmingli-Ben/llm-mock, one run each."""
CACHE_CAPTION = (
    SOURCE
    + """
Same shapes, at a level within the spread of the draws. But by its own formula 1.5 cached tokens of a prompt save next \
to nothing: ours gain {gain:.2f} %, where the chart's single runs have 11 % between them."""
)
BATCH_CAPTION = (
    SOURCE
    + """
The README says "TTFT and TPOT both decrease with higher batch sizes"; its own chart says the opposite for TTFT (126 \
to 131 s), and its TPOT panel repeats the TTFT curves. Ours is {worse:.0f} % worse from b = 10 to 20 (median; \
{low:.0f} to {high:.0f} % over the draws): a step that prefills a newcomer costs as if all b were that prompt."""
)


def captions(points: Sequence[Point]) -> tuple[str, str]:
    """Return the two figures' captions, filled in with results."""
    ten = _of(points, 10)
    ratio = 100 * (_batch_ratio(points) - 1)
    values = {
        "draws": len(ten[0].runs),
        "gain": 100 * float(np.median(ten[-1].gains(ttft))),
        "worse": float(np.median(ratio)),
        "low": float(ratio.min()),
        "high": float(ratio.max()),
    }
    return CACHE_CAPTION.format(**values), BATCH_CAPTION.format(**values)


def table(points: Sequence[Point], original: Original) -> list[dict[str, object]]:
    """Return a row for every setting: medians and the middle 80 % of the draws, with the charts' values."""
    rows: list[dict[str, object]] = []
    for point in points:
        row: dict[str, object] = {
            "batch_size": point.batch_size,
            "cache_size": point.cache_size,
            "system_tokens": point.system_tokens,
            "draws": len(point.runs),
            "throughput_requests_per_s": float(np.median(point.values(lambda run: run.throughput))),
            "hit_tokens": float(np.median(point.values(lambda run: run.hit_tokens))),
        }
        for name, of in (("ttft_p99_s", ttft), ("tpot_gpt2_p99_ms", tpot_gpt2), ("tpot_p99_ms", tpot)):
            low, middle, high = np.percentile(point.values(of), (10, 50, 90)).tolist()
            row |= {name: middle, f"{name}_low": low, f"{name}_high": high}
            row[f"{name}_gain"] = float(np.median(point.gains(of)))
        for series in ("request_throughput", "avg_cache_hit_length", "p99_ttft", "p99_tpot"):
            key = series, point.batch_size, point.cache_size
            row[f"llm_mock_{series}"] = "" if point.system_tokens else original.get(key, "")
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    parser = figure.parser(__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS, help="how often 50 prompts are drawn")
    parser.add_argument("--corpus", type=int, default=CORPUS_PROMPTS, help="prompts that the cache is built from")
    options = parser.parse_args(arguments)
    points, original = study(options.draws, options.corpus), read_original()
    cache_caption, batch_caption = captions(points)
    figure.write_table(options.out, NAME, table(points, original))
    figure.save(lambda: draw_cache(points, original), options.out, f"{NAME}_cache", cache_caption)
    figure.save(lambda: draw_batch(points, original), options.out, f"{NAME}_batch", batch_caption)


if __name__ == "__main__":
    main()
