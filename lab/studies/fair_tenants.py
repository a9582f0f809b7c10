"""One tenant sends ten times its share: what do the others notice?

    python -m lab.studies.fair_tenants [--out docs/figures] [--seconds 300]

Ten tenants send Poisson requests to one A100 with Llama-3-8B, 1.9 a second each, which together is about four fifths of
what it can serve. Then one of them sends 2, 4 and 10 times as much. Three policies: first come first served, virtual
token counters by tenant (policy = "vtc_fair", fair_by = "tenant"), and the same with at most 16 requests of one tenant
running at once (fair_max_running), four times what a tenant at its share has. The nine others send the same requests
each time; their p99 TTFT is over all requests of theirs.

Writes fair_tenants.csv and the figure. Takes about a minute and a half.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

import lorrery
from lab.studies import figure
from lorrery.loadgen.workload.summary import jain_index

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "fair_tenants"
MODEL, GPU = "Llama-3-8B", "A100-80-SXM"
NUM_TENANTS, SHARE, MAX_RUNNING = 10, 1.9, 16
PROMPT, OUTPUT = (128, 384), (64, 192)
TIMES = (1, 2, 4, 10)
GREEDY = f"tenant-{NUM_TENANTS - 1}"
SECONDS = 300.0
POLICIES: dict[str, dict[str, object]] = {
    "first come, first served": {"policy": "fcfs"},
    "VTC by tenant": {"policy": "vtc_fair", "fair_by": "tenant"},
    f"VTC by tenant, {MAX_RUNNING} running at most": {
        "policy": "vtc_fair",
        "fair_by": "tenant",
        "fair_max_running": MAX_RUNNING,
    },
}


@dataclass(frozen=True, slots=True)
class Row:
    """One run: the greedy tenant's load, and the resulting figures."""

    policy: str
    times_its_share: int
    others_ttft_p99_ms: float
    greedy_ttft_p99_ms: float
    jain_index: float


def workload(times: float, seconds: float, seed: int = 1) -> lorrery.Requests:
    """Draw the requests of all tenants; the others' do not depend on `times`."""
    rng = np.random.default_rng(seed)
    at, prompts, outputs, tenants = [], [], [], []
    for number in range(NUM_TENANTS):
        name = f"tenant-{number}"
        count = int(rng.poisson(SHARE * (times if name == GREEDY else 1) * seconds))
        at.append(np.sort(rng.uniform(0, seconds, count)))
        prompts.append(rng.integers(*PROMPT, count))
        outputs.append(rng.integers(*OUTPUT, count))
        tenants += [name] * count
    seconds_of_all = np.concatenate(at)
    order = np.argsort(seconds_of_all, kind="stable")
    return lorrery.Requests(
        at_seconds=seconds_of_all[order],
        prompt_tokens=np.concatenate(prompts)[order],
        output_tokens=np.concatenate(outputs)[order],
        tenant_id=[tenants[index] for index in order],
    )


def measure(policy: str, times: int, seconds: float) -> Row:
    """Simulate one run."""
    settings = {
        "model": MODEL,
        "scheduler": {
            "batching": "chunked",
            "limits": "vllm",
            "max_num_seqs": 256,
            "max_num_batched_tokens": 1024,
            "max_waiting_requests": 1_000_000,
            **POLICIES[policy],
        },
        "worker": {"gpu": GPU},
    }
    result = lorrery.simulate(settings, workload(times, seconds), workers=1)
    columns = result.columns
    greedy = columns.tenant_id == GREEDY
    p99_ms = [float(np.quantile(columns.ttft_seconds[which], 0.99)) * 1e3 for which in (~greedy, greedy)]
    return Row(policy, times, p99_ms[0], p99_ms[1], _jain_index(columns, seconds))


def _jain_index(columns: lorrery.RequestColumns, seconds: float) -> float:
    """Return Jain's index of the tokens that tenants received while all were sending."""
    within = columns.end_seconds <= seconds
    tokens = columns.prompt_tokens + columns.output_tokens
    return jain_index(
        float(tokens[within & (columns.tenant_id == tenant)].sum()) for tenant in np.unique(columns.tenant_id)
    )


def study(seconds: float = SECONDS) -> list[Row]:
    """Measure every policy over every load."""
    return [measure(policy, times, seconds) for policy in POLICIES for times in TIMES]


def draw(rows: Sequence[Row]) -> "Figure":
    """Draw the other tenants' TTFT, absolute and relative to that at one share."""
    drawn, axes = figure.canvas(1, 2, 4.2)
    axes[0].set_title("The nine others: p99 TTFT")
    axes[1].set_title("The same, over that at one share")
    axes[0].set_ylabel("p99 TTFT (ms)")
    axes[1].set_ylabel("p99 TTFT (ratio to that at one share)")
    for index, policy in enumerate(POLICIES):
        its = [row for row in rows if row.policy == policy]
        x = [row.times_its_share for row in its]
        values = [row.others_ttft_p99_ms for row in its]
        look = figure.series(index)
        for one, y in zip(axes, (values, [value / values[0] for value in values]), strict=True):
            one.plot(x, y, color=look.colour, marker=look.marker, label=policy)
    axes[1].axhline(1.2, color=figure.GREY, linestyle=":")
    axes[1].annotate(
        "20 % more", (TIMES[-1], 1.2), xytext=(0, 3), textcoords="offset points", ha="right", fontsize=8,
        color=figure.GREY,
    )  # fmt: skip
    for one in axes:
        one.set_xscale("log", base=2)
        one.set_yscale("log")
        one.set_xticks(TIMES, [str(times) for times in TIMES])
        one.set_xlabel("what one tenant sends (shares)")
        one.yaxis.set_major_formatter("{x:,g}")
    figure.legend_above(drawn, axes[0], columns=3)
    return drawn


CAPTION = f"""\
{NUM_TENANTS} tenants, {SHARE:g} requests/s each, prompts of {PROMPT[0]} to {PROMPT[1]} and outputs of {OUTPUT[0]} to \
{OUTPUT[1]} tokens, one {GPU} with {MODEL}, chunked prefill; simulated. Without a bound on running requests, counters \
alone are fair in tokens, but those who come find the batch full and wait until a place is free."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    parser = figure.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of traffic")
    options = parser.parse_args(arguments)
    rows = study(options.seconds)
    figure.write_table(options.out, NAME, map(asdict, rows))
    figure.save(lambda: draw(rows), options.out, NAME, CAPTION)


if __name__ == "__main__":
    main()
