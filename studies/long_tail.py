"""Does a short request wait for a long one, in prefill and in decode? Asked of the live cluster, per way to batch.

    python -m studies.long_tail [--out docs/figures]

The questions are seed document 000's. Each way to batch gets a cluster of its own (real processes, one worker with an
A100 under `roofline`), and three figures, each beside the same without the long request:

* prefill: a prompt of 32 tokens arrives together with one of 8,000, behind it. Its time to first token.
* stall: the longest gap between two tokens of a stream that was running already when these prompts came.
* decode: a request for 20 tokens arrives together with one for 600, both with short prompts. Its end-to-end time.

Writes long_tail.csv (milliseconds, the median of the repetitions) and long_tail.svg.
"""

import argparse
import asyncio
import csv
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import matplotlib as mpl
from lorrery.v1.router_pb2 import GenerateRequest, TokenIds
from lorrery.v1.types_pb2 import SamplingParams

from chassis.settings import TlsSettings
from cli.cluster import LocalCluster
from loadgen.client import Reception, RouterClient

mpl.use("svg")
from matplotlib import pyplot as plt

WAYS = {
    "S-LoRA's loop": ("req_queue", "slora_loop"),
    "static": ("fcfs", "static"),
    "continuous": ("fcfs", "continuous"),
    "mixed": ("fcfs", "mixed"),
    "chunked (512)": ("fcfs", "chunked"),
}
FIGURES = ("prefill", "stall", "decode")
LONG_PROMPT, SHORT_PROMPT = 8_000, 32
LONG_OUTPUT, SHORT_OUTPUT = 600, 20
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Row:
    """One figure of one way to batch, in milliseconds: without and with the long request."""

    way: str
    figure: str
    without_ms: float
    with_ms: float


class Client:
    """Sends requests and keeps when their tokens came."""

    def __init__(self, router: RouterClient) -> None:
        self._router = router

    def send(self, tasks: asyncio.TaskGroup, prompt: int, output: int) -> tuple[Reception, "asyncio.Task[None]"]:
        """Send one request now."""
        reception = Reception()
        request = GenerateRequest(
            token_ids=TokenIds(ids=[3 + n % 1900 for n in range(prompt)]),
            sampling=SamplingParams(max_new_tokens=output, ignore_eos=True),
        )
        receive = self._router.receive(
            request, reception, timeout_seconds=TIMEOUT_SECONDS, on_tokens=lambda _num_tokens: None
        )
        return reception, tasks.create_task(receive)

    async def decode(self, *, with_long: bool) -> float:
        """Return the end-to-end time of a short output, in seconds."""
        async with asyncio.TaskGroup() as tasks:
            start = asyncio.get_running_loop().time()
            if with_long:
                self.send(tasks, SHORT_PROMPT, LONG_OUTPUT)
            short, done = self.send(tasks, SHORT_PROMPT, SHORT_OUTPUT)
            await done
            ended = asyncio.get_running_loop().time()
        assert sum(short.message_tokens) == SHORT_OUTPUT, short.detail
        return ended - start

    async def prefill(self, *, with_long: bool) -> tuple[float, float]:
        """Return the short prompt's time to first token and the running stream's longest gap, in seconds."""
        async with asyncio.TaskGroup() as tasks:
            running, _ = self.send(tasks, SHORT_PROMPT, 150)
            while len(running.message_seconds) < 20:  # noqa: ASYNC110  a client that watches its own stream
                await asyncio.sleep(0.005)
            num_before = len(running.message_seconds)
            start = running.message_seconds[-1]
            if with_long:
                self.send(tasks, LONG_PROMPT, 4)
            short, done = self.send(tasks, SHORT_PROMPT, 4)
            await done
        after = running.message_seconds[num_before - 1 :]
        stall = max(late - early for early, late in pairwise(after))
        assert short.message_seconds, short.detail
        return short.message_seconds[0] - start, stall


async def measure(way: str, repetitions: int) -> list[Row]:
    """Measure one way to batch on a cluster of its own."""
    policy, batching = WAYS[way]
    overrides = [
        "model=Llama-3-8B",
        "worker.gpu=A100-80-SXM",
        "scheduler.listen=127.0.0.1:0",
        "scheduler.metrics=127.0.0.1:0",
        "router.listen=127.0.0.1:0",
        "router.metrics=127.0.0.1:0",
        "log.level=warning",
        f"scheduler.policy={policy}",
        f"scheduler.batching={batching}",
        "scheduler.max_req_input_len=9000",
        "scheduler.max_req_total_len=10000",
        f"scheduler.max_num_batched_tokens={512 if batching == 'chunked' else 10000}",
        "scheduler.max_num_seqs=64",
    ]
    seen: dict[tuple[str, bool], list[float]] = {}
    async with LocalCluster(None, overrides) as cluster, RouterClient(cluster.router_address, TlsSettings()) as router:
        client = Client(router)
        for _ in range(repetitions):
            for with_long in (False, True):
                ttft, stall = await client.prefill(with_long=with_long)
                seen.setdefault(("prefill", with_long), []).append(ttft)
                seen.setdefault(("stall", with_long), []).append(stall)
                seen.setdefault(("decode", with_long), []).append(await client.decode(with_long=with_long))
    return [Row(way, figure, 1e3 * median(seen[figure, False]), 1e3 * median(seen[figure, True])) for figure in FIGURES]


def plot(rows: list[Row], path: Path) -> None:
    """Draw the three figures side by side."""
    titles = {
        "prefill": "Prefill: TTFT of a 32-token prompt\nthat came with one of 8,000",
        "stall": "Stall: longest gap of a stream\nthat was running",
        "decode": "Decode: end-to-end time of 20 tokens\nasked for together with 600",
    }
    fig, axes = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True, layout="constrained")
    ways = list(WAYS)
    for axis, figure in zip(axes, FIGURES, strict=True):
        chosen = {row.way: row for row in rows if row.figure == figure}
        places = range(len(ways))
        without = [chosen[way].without_ms for way in ways]
        together = [chosen[way].with_ms for way in ways]
        axis.barh([place - 0.2 for place in places], without, 0.38, color="#b0bec5", label="without the long request")
        bars = axis.barh([place + 0.2 for place in places], together, 0.38, color="#00796b", label="with it")
        axis.bar_label(bars, labels=[f" {value:,.0f}" for value in together], fontsize=8)
        axis.set_title(titles[figure], fontsize=10)
        axis.set_yticks(list(places), ways)
        axis.set_xlabel("ms")
        axis.set_xlim(0, 1.15 * max(together))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=8, loc="lower right")
    fig.savefig(path)


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    rows: list[Row] = []
    for way in WAYS:
        rows += asyncio.run(measure(way, options.repetitions))
        for row in rows[-len(FIGURES) :]:
            print(
                f"{row.way:15} {row.figure:8} without {row.without_ms:8.1f} ms   with {row.with_ms:8.1f} ms", flush=True
            )
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "long_tail.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["way", "figure", "without_ms", "with_ms"])
        writer.writerows([row.way, row.figure, f"{row.without_ms:.1f}", f"{row.with_ms:.1f}"] for row in rows)
    plot(rows, options.out / "long_tail.svg")


if __name__ == "__main__":
    main()
