"""Static against continuous batching: how many passes through the model the same 32 requests take.

    python -m lab.studies.static_continuous [--out docs/figures]

Seed document 002's demonstration: 32 requests for 8 places, all there at the start; every eighth asks for 100 tokens,
the others for 10. Its loop prefills whoever has a place, then decodes one token for all, then drops who has finished.
That is our batching `continuous`; its "naive" batching is our `static`. A request's first token comes out of its
prefill, so the loop as given makes, counted by hand, 6 prefills and 126 decode passes with 5.14 sequences in each on
average; in batches of 8 that all run to the longest's end it is 4 times 100 passes.

Here the scheduler and the mock GPU run it (Llama-2-7B on an A10G, prompts of 7 tokens), and every pass is counted.
Writes static_continuous.csv (the counts) and static_continuous.png (who has which place in which pass). Takes about a
second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

import lorrery
from lab.studies import figure
from lorrery.scheduler.core.facts import Handler
from lorrery.simulator.loop.request import SimulatedRequest
from lorrery.simulator.loop.worker import StepSpan
from lorrery.vocabulary.units import PS_PER_SECOND

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "static_continuous"
NUM_REQUESTS, NUM_PLACES, EVERY = 32, 8, 8
LONG_OUTPUT, SHORT_OUTPUT, PROMPT = 100, 10, 7
WAYS = ("static", "continuous")


def workload() -> lorrery.Requests:
    """Return the seed's queue: every eighth request is long, the first included."""
    outputs = np.full(NUM_REQUESTS, SHORT_OUTPUT)
    outputs[::EVERY] = LONG_OUTPUT
    return lorrery.Requests(np.zeros(NUM_REQUESTS), np.full(NUM_REQUESTS, PROMPT), outputs)


@dataclass(slots=True)
class Passes:
    """Every pass through the model; an observer of a simulation that runs step by step.

    Attributes:
        decodes: number of sequences that got a token, for each decode pass.
        kinds: "prefill" or "decode", for each pass.
        ends_ps: end time of each pass.
        joined_at: the pass in which each request was prefilled.
    """

    decodes: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    ends_ps: list[int] = field(default_factory=list)
    joined_at: dict[int, int] = field(default_factory=dict)

    @property
    def handlers(self) -> Mapping[type, Handler]:
        """See `Subscriber`."""
        return {StepSpan: self._ran}

    def _ran(self, span: StepSpan, at_ps: int, member: object) -> None:
        """Record one pass."""
        assert span.num_steps == 1
        for chunk in span.plan.prefills:
            self.joined_at[chunk.sequence.handle] = len(self.kinds)
        self.kinds.append("prefill" if span.plan.prefills else "decode")
        if not span.plan.prefills:
            self.decodes.append(span.num_decodes)
        self.ends_ps.append(span.end_ps)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way to batch: its passes, and the range of passes in which each request held a place and used it.

    Attributes:
        spans: (first pass, one past the last that gave it a token, one past the last in which it held a place).
    """

    way: str
    passes: Passes
    spans: list[tuple[int, int, int]]
    mean_e2e_s: float

    @property
    def row(self) -> dict[str, object]:
        """The counts as a table row."""
        decode_passes = [number for number, kind in enumerate(self.passes.kinds) if kind == "decode"]
        taken = [sum(first <= number < left for first, _, left in self.spans) for number in decode_passes]
        return {
            "batching": self.way,
            "prefill_passes": len(self.passes.kinds) - len(decode_passes),
            "decode_passes": len(decode_passes),
            "passes": len(self.passes.kinds),
            "mean_places_taken": float(np.mean(taken)),
            "mean_places_that_give_a_token": float(np.mean(self.passes.decodes)),
            "duration_s": self.passes.ends_ps[-1] / PS_PER_SECOND,
            "mean_e2e_s": self.mean_e2e_s,
        }


def measure(way: str) -> Outcome:
    """Run the queue under one way to batch, step by step."""
    settings = {
        "model": "Llama-2-7B",
        "scheduler": {"policy": "fcfs", "batching": way, "max_num_seqs": NUM_PLACES},
        "worker": {"gpu": "A10G"},
    }
    passes, ended = Passes(), list[SimulatedRequest]()
    result = lorrery.simulate(settings, workload(), workers=1, one_step=True, subscribers=[passes], on_end=ended.append)
    assert result.columns.completed.all()
    spans = [_span(request, passes) for request in sorted(ended, key=lambda request: request.handle)]
    return Outcome(way, passes, spans, float(np.mean(result.columns.end_seconds)))


def _span(request: SimulatedRequest, passes: Passes) -> tuple[int, int, int]:
    first = passes.joined_at[request.handle]
    left = passes.ends_ps.index(request.finished_ps or 0) + 1
    last_decode, useful = first, 1
    while useful < request.output_tokens:
        last_decode += 1
        useful += passes.kinds[last_decode] == "decode"
    return first, last_decode + 1, left


def _places(spans: Sequence[tuple[int, int, int]]) -> list[int]:
    """Assign each request the lowest free place; the scheduler counts places and does not number them."""
    free_from = [0] * NUM_PLACES
    chosen = []
    for first, _, left in spans:
        place = next(place for place in range(NUM_PLACES) if free_from[place] <= first)
        free_from[place] = left
        chosen.append(place)
    return chosen


def _draw_passes(axes: "Axes", outcome: Outcome) -> None:
    places = _places(outcome.spans)
    for index, ((first, useful, left), place) in enumerate(zip(outcome.spans, places, strict=True)):
        is_long = index % EVERY == 0
        colour = figure.BLUE if is_long else figure.SKY
        axes.barh(place, left - first, 0.82, first, color=figure.PALE)
        axes.barh(place, useful - first, 0.82, first, color=colour, edgecolor="white", linewidth=0.6)
    for number, kind in enumerate(outcome.passes.kinds):
        if kind == "prefill":
            axes.axvspan(number, number + 1, ymin=0.965, color=figure.VERMILLION, linewidth=0)
    row = outcome.row
    axes.set_title(
        f"{outcome.way}: {row['prefill_passes']} prefills + {row['decode_passes']} decode passes = {row['passes']};"
        f" {row['duration_s']:.1f} s in all, {row['mean_e2e_s']:.1f} s a request\n"
        f"{row['mean_places_that_give_a_token']:.2f} of {NUM_PLACES} places give a token in a decode pass"
    )
    axes.set_ylabel("place in the batch (number)")
    axes.set_yticks(range(NUM_PLACES), [str(place + 1) for place in range(NUM_PLACES)])
    axes.set_ylim(NUM_PLACES - 0.5, -0.9)
    axes.grid(visible=False, axis="y")


def draw(outcomes: Sequence[Outcome]) -> "Figure":
    """Draw which request holds which place in each pass."""
    drawn, axes = figure.canvas(len(outcomes), 1, 5.6)
    most = max(len(outcome.passes.kinds) for outcome in outcomes)
    for one, outcome in zip(axes, outcomes, strict=True):
        _draw_passes(one, outcome)
        one.set_xlim(0, most)
        one.set_xlabel("pass through the model (number)")
    for colour, label in (
        (figure.BLUE, f"asks {LONG_OUTPUT} tokens"),
        (figure.SKY, f"asks {SHORT_OUTPUT} tokens"),
        (figure.PALE, "has ended, keeps its place"),
        (figure.VERMILLION, "prefill pass"),
    ):
        axes[-1].bar(0, 0, color=colour, label=label)
    figure.legend_above(drawn, axes[-1], columns=4)
    return drawn


CAPTION = """\
Seed document 002's queue: 32 requests, 8 places, every eighth asks 100 tokens and the others 10; Llama-2-7B on one \
A10G, prompts of 7 tokens. The counts are those of the document's own loop, counted by hand: 6 prefills and 126 \
decode passes at a mean occupancy of 5.14, against 4 batches of 100 passes (1 prefill and 99 decodes each). The \
continuous batch is not full either: from pass 60 on nobody waits, and only the four long requests are left."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    options = figure.parser(__doc__).parse_args(arguments)
    outcomes = [measure(way) for way in WAYS]
    figure.write_table(options.out, NAME, [outcome.row for outcome in outcomes])
    figure.save(lambda: draw(outcomes), options.out, NAME, CAPTION)


if __name__ == "__main__":
    main()
