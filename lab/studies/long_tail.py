"""Does a short request wait for a long one? Seed document 000's three questions, per way to batch.

    python -m lab.studies.long_tail [--out docs/figures]

One worker (an A100 with Llama-3-8B) serves a stream that began before. Then come, a millisecond apart:

* budget: a prompt of nearly as many tokens as one batch may have (`batch_max_tokens`), and behind it one of 32, which
  does not fit any more. The short one's time to first token.
* prefill: a prompt of 8,000 tokens and behind it one of 32, which fits beside it. The short one's time to first token.
* stall: the same; the longest gap between two tokens of the stream that was running.
* decode: (nothing else runs) a request for 600 tokens and one for 20, short prompts. The 20 tokens' end-to-end time.

Each stands beside the same without the long request. Writes long_tail.csv and the figure. Takes about two seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import lorrery
from lab.studies import figure
from lorrery.scheduler.core.facts import Handler
from lorrery.simulator.loop.worker import StepSpan
from lorrery.vocabulary.units import PS_PER_SECOND

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "long_tail"
WAYS = {
    "S-LoRA's loop": ("req_queue", "slora_loop"),
    "static": ("fcfs", "static"),
    "continuous": ("fcfs", "continuous"),
    "mixed": ("fcfs", "mixed"),
    "chunked (512)": ("fcfs", "chunked"),
}
QUESTIONS = {
    "budget": "Budget: TTFT of a prompt of 32 tokens\nthat no longer fits beside one of 8,190",
    "prefill": "Prefill: TTFT of a prompt of 32 tokens\nthat fits beside one of 8,000",
    "stall": "Stall: longest gap of a running stream\nwhile these 8,000 are prefilled",
    "decode": "Decode: end-to-end time of 20 tokens\nasked for together with 600",
}
SHORT_PROMPT, LONG_PROMPT, FULL_PROMPT = 32, 8_000, 8_190
MAX_BATCH_TOKENS, CHUNK_TOKENS = 8_200, 512
SHORT_OUTPUT, LONG_OUTPUT, PROBE_OUTPUT = 20, 600, 4
RUNNING_OUTPUT, RUNNING_BEFORE = 150, 20
"""Tokens of the running stream, and how many it has when the other requests arrive."""
_AFTER_SECONDS = 0.002
"""Delay of the arrivals after a token: within a step, so that no tie matters."""
_BEHIND_SECONDS = 0.001
"""Delay of the short request after the long one, as from one client."""


@dataclass(frozen=True, slots=True)
class Row:
    """One question for one way to batch, in milliseconds: without and with the long request."""

    way: str
    question: str
    without_ms: float
    with_ms: float


def sections(way: str) -> dict[str, Any]:
    """Return the settings of a cluster that uses this way to batch."""
    policy, batching = WAYS[way]
    return {
        "model": "Llama-3-8B",
        "scheduler": {
            "policy": policy,
            "batching": batching,
            "max_req_input_len": FULL_PROMPT,
            "max_req_total_len": MAX_BATCH_TOKENS,
            "batch_max_tokens": MAX_BATCH_TOKENS,
            "max_num_batched_tokens": CHUNK_TOKENS if batching == "chunked" else MAX_BATCH_TOKENS,
            "max_num_seqs": 64,
        },
        "worker": {"gpu": "A100-80-SXM"},
    }


@dataclass(slots=True)
class DecodeTimes:
    """End times of decode steps, in picoseconds; an observer of a simulation that runs step by step."""

    ends_ps: list[int] = field(default_factory=list)

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {StepSpan: self._ran}

    def _ran(self, span: StepSpan, at_ps: int, member: object) -> None:
        """Record one step."""
        if span.plan.decode:
            self.ends_ps.append(span.end_ps)


class Scene:
    """Measures the simulated cluster of one way to batch."""

    def __init__(self, way: str) -> None:
        self._settings = sections(way)
        _, times = self._run([(0.0, SHORT_PROMPT, RUNNING_OUTPUT)])
        # The first token comes from the prefill, each of the others from one decode step.
        self._come_seconds = times.ends_ps[RUNNING_BEFORE - 2] / PS_PER_SECOND + _AFTER_SECONDS

    def _run(self, asked: Sequence[tuple[float, int, int]]) -> tuple[lorrery.RequestColumns, DecodeTimes]:
        times = DecodeTimes()
        requests = lorrery.Requests(*zip(*asked, strict=True))
        columns = lorrery.simulate(self._settings, requests, workers=1, one_step=True, subscribers=[times]).columns
        assert columns.completed.all()
        return columns, times

    def prefill_ms(self, long_prompt: int | None) -> tuple[float, float]:
        """Return the short prompt's time to first token and the running stream's longest gap."""
        asked = [(0.0, SHORT_PROMPT, RUNNING_OUTPUT)]
        if long_prompt is not None:
            asked.append((self._come_seconds, long_prompt, PROBE_OUTPUT))
        asked.append((self._come_seconds + _BEHIND_SECONDS, SHORT_PROMPT, PROBE_OUTPUT))
        columns, times = self._run(asked)
        running_ends_ps = round(float(columns.end_seconds[0]) * PS_PER_SECOND)
        tokens_ps = [end for end in times.ends_ps if end <= running_ends_ps]
        gap_ps = max(late - early for early, late in pairwise(tokens_ps[RUNNING_BEFORE - 2 :]))
        return float(columns.ttft_seconds[-1]) * 1e3, gap_ps / 1e9

    def decode_ms(self, *, with_long: bool) -> float:
        """Return the end-to-end time of a short output."""
        asked = [(_BEHIND_SECONDS, SHORT_PROMPT, SHORT_OUTPUT)]
        if with_long:
            asked.insert(0, (0.0, SHORT_PROMPT, LONG_OUTPUT))
        columns, _ = self._run(asked)
        return float(columns.e2e_seconds[-1]) * 1e3


def measure(way: str) -> list[Row]:
    """Measure every question for one way to batch, simulated."""
    scene = Scene(way)
    ttft_ms, gap_ms = scene.prefill_ms(None)
    full_ttft_ms, _ = scene.prefill_ms(FULL_PROMPT)
    long_ttft_ms, long_gap_ms = scene.prefill_ms(LONG_PROMPT)
    return [
        Row(way, "budget", ttft_ms, full_ttft_ms),
        Row(way, "prefill", ttft_ms, long_ttft_ms),
        Row(way, "stall", gap_ms, long_gap_ms),
        Row(way, "decode", scene.decode_ms(with_long=False), scene.decode_ms(with_long=True)),
    ]


def draw(rows: Sequence[Row]) -> "Figure":
    """Draw a panel for each question."""
    drawn, axes = figure.canvas(2, 2, 6.0)
    ways = list(WAYS)
    for one, (question, title) in zip(axes, QUESTIONS.items(), strict=True):
        its = {row.way: row for row in rows if row.question == question}
        groups = [
            figure.Bars("without the long request", figure.PALE, [its[way].without_ms for way in ways]),
            figure.Bars("with it", figure.BLUE, [its[way].with_ms for way in ways]),
        ]
        figure.bars(one, ways, groups, ",.0f")
        one.set_title(title)
        one.set_xlabel("time (ms)")
    figure.legend_above(drawn, axes[0], columns=2)
    return drawn


CAPTION = f"""\
One A100-80-SXM, Llama-3-8B; at most {MAX_BATCH_TOKENS:,} prompt tokens in a batch (chunks of {CHUNK_TOKENS} for \
"chunked"). A stream of {RUNNING_OUTPUT} tokens has {RUNNING_BEFORE} of them when the others come; static batching \
lets nobody in before it has ended. All simulated."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    options = figure.parser(__doc__).parse_args(arguments)
    rows = [row for way in WAYS for row in measure(way)]
    table = [
        {"way": r.way, "question": r.question, "without_ms": round(r.without_ms, 1), "with_ms": round(r.with_ms, 1)}
        for r in rows
    ]
    figure.write_table(options.out, NAME, table)
    figure.save(lambda: draw(rows), options.out, NAME, CAPTION)


if __name__ == "__main__":
    main()
