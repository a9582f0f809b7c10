r"""What a larger batch buys and costs: seed document 002's sweep over batch sizes 1 to 128.

    python -m lab.studies.batch_sizes [--out docs/figures] [--largest 128]

A batch of b equal prompts is generated at once, 10 tokens each. As in the document, throughput is b * 10 / duration and
"latency" is duration / 10, so the prefill is part of both. Three prompt lengths: 7 tokens (a line of text, as there),
512, and 1,750 (what its questioner has: 1,500 to 2,000), on one A100 with Llama-3-8B. A point of 7 tokens is

    lorrery simulate --config /dev/null --workers 1 --workload constant -n B --concurrency B \
      --input-range 7 --output-range 10 --set model=Llama-3-8B --set worker.gpu=A100-80-SXM \
      --set scheduler.policy=fcfs --set scheduler.batching=static --set scheduler.max_num_seqs=B

Writes batch_sizes.csv and the figure. Takes about two seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lorrery
from lab.studies import figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "batch_sizes"
MODEL, GPU = "Llama-3-8B", "A100-80-SXM"
OUTPUT = 10
PROMPTS = (7, 512, 1_750)
LARGEST = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One batch: its size, its prompts' length, and how long it took."""

    prompt_tokens: int
    batch_size: int
    duration_s: float
    ttft_s: float

    @property
    def throughput(self) -> float:
        """Tokens per second, as defined in the document."""
        return self.batch_size * OUTPUT / self.duration_s

    @property
    def per_token_ms(self) -> float:
        """The document's average latency: duration over tokens of one sequence."""
        return self.duration_s / OUTPUT * 1e3

    @property
    def tpot_ms(self) -> float:
        """(E2E - TTFT) / (output tokens - 1): decode alone."""
        return (self.duration_s - self.ttft_s) / (OUTPUT - 1) * 1e3


def measure(prompt_tokens: int, batch_size: int) -> Row:
    """Generate one batch."""
    longest = max(64, 2 * prompt_tokens)
    settings = {
        "model": MODEL,
        "scheduler": {
            "policy": "fcfs",
            "batching": "static",
            "max_num_seqs": batch_size,
            "max_req_input_len": prompt_tokens,
            "max_req_total_len": longest,
            "max_num_batched_tokens": batch_size * longest,
        },
        "worker": {"gpu": GPU},
    }
    load = {
        "workload": "constant",
        "num_requests": batch_size,
        "concurrency": batch_size,
        "input_range": prompt_tokens,
        "output_range": OUTPUT,
    }
    summary = lorrery.simulate(settings, load, workers=1).summary
    assert summary.num_completed == batch_size
    return Row(prompt_tokens, batch_size, summary.duration_seconds, summary.from_sent.ttft_ms.p50 / 1e3)


def study(largest: int = LARGEST) -> list[Row]:
    """Measure every prompt length over batch sizes 1, 2, 4 ... `largest`."""
    sizes = [2**power for power in range(largest.bit_length())]
    return [measure(prompt_tokens, batch_size) for prompt_tokens in PROMPTS for batch_size in sizes]


def _sizes(axes: "Axes", sizes: Sequence[int], label: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.yaxis.set_major_locator(FixedLocator([a * 10**b for b in range(6) for a in (1, 2, 5)]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("batch size (sequences)")
    axes.set_ylabel(label)


def draw(rows: Sequence[Row]) -> "Figure":
    """Draw throughput, latency, and the latency without the prefill."""
    drawn, axes = figure.canvas(1, 3, 3.9)
    sizes = sorted({row.batch_size for row in rows})
    panels = (
        ("b x 10 / duration", "throughput (tokens/s)"),
        ("duration / 10", "time per token (ms)"),
        ("Decode alone", "TPOT (ms)"),
    )
    for one, (title, label) in zip(axes, panels, strict=True):
        one.set_title(title)
        _sizes(one, sizes, label)
    for index, prompt_tokens in enumerate(PROMPTS):
        look = figure.series(index)
        colour, marker = look.colour, look.marker
        its = [row for row in rows if row.prompt_tokens == prompt_tokens]
        x = [row.batch_size for row in its]
        axes[0].plot(
            x,
            [row.throughput for row in its],
            color=colour,
            marker=marker,
            label=f"prompts of {prompt_tokens:,} tokens",
        )
        axes[1].plot(x, [row.per_token_ms for row in its], color=colour, marker=marker)
        axes[2].plot(x, [row.tpot_ms for row in its], color=colour, marker=marker)
    first = rows[0]
    axes[0].plot(
        sizes,
        [size * first.throughput for size in sizes],
        ":",
        color=figure.GREY,
        label="b times the throughput of one",
    )
    for one in axes[1:]:
        one.sharey(axes[1])
    figure.legend_above(drawn, axes[0], columns=4)
    return drawn


CAPTION = f"""\
One {GPU}, {MODEL}, static batching of b equal requests, {OUTPUT} tokens each; step times by the roofline model \
(docs/step-time.md). All prompts of a batch are prefilled in one step. The document gives its program and no figures, \
so there is nothing to compare with."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    parser = figure.parser(__doc__)
    parser.add_argument("--largest", type=int, default=LARGEST, help="batch size to stop at")
    options = parser.parse_args(arguments)
    rows = study(options.largest)
    figure.write_table(
        options.out,
        NAME,
        [
            {
                "prompt_tokens": row.prompt_tokens,
                "batch_size": row.batch_size,
                "duration_s": row.duration_s,
                "throughput_tokens_per_s": row.throughput,
                "time_per_token_ms": row.per_token_ms,
                "ttft_ms": row.ttft_s * 1e3,
                "tpot_ms": row.tpot_ms,
            }
            for row in rows
        ],
    )
    figure.save(lambda: draw(rows), options.out, NAME, CAPTION)


if __name__ == "__main__":
    main()
