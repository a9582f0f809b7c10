"""The measurements of `lab.studies.long_tail` on a live cluster: real processes and streams, on the wall clock."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from lab.studies.long_tail import (
    FULL_PROMPT,
    LONG_OUTPUT,
    LONG_PROMPT,
    PROBE_OUTPUT,
    QUESTIONS,
    RUNNING_BEFORE,
    RUNNING_OUTPUT,
    SHORT_OUTPUT,
    SHORT_PROMPT,
    Row,
    sections,
)
from lorrery.chassis.sections import TlsSettings
from lorrery.loadgen.client import Reception, RouterClient
from lorrery.local.cluster import LocalCluster
from lorrery.v1.router_pb2 import GenerateRequest, TokenIds
from lorrery.v1.types_pb2 import SamplingParams

_TIMEOUT_SECONDS = 60.0
_OWN = {
    "scheduler": {"listen": "127.0.0.1:0", "metrics": "127.0.0.1:0"},
    "router": {"listen": "127.0.0.1:0", "metrics": "127.0.0.1:0", "http": "127.0.0.1:0"},
    "log": {"level": "warning"},
}
"""Settings that a live cluster needs in addition to the study's: its own ports, and little logging."""


class _Client:
    """Sends requests and records when their tokens arrive."""

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
            request, reception, timeout_seconds=_TIMEOUT_SECONDS, on_tokens=lambda _num_tokens: None
        )
        return reception, tasks.create_task(receive)

    async def decode(self, *, with_long: bool) -> float:
        """Return the end-to-end time of a short output, in seconds."""
        async with asyncio.TaskGroup() as tasks:
            start = time.monotonic()
            if with_long:
                self.send(tasks, SHORT_PROMPT, LONG_OUTPUT)
            short, done = self.send(tasks, SHORT_PROMPT, SHORT_OUTPUT)
            await done
            ended = time.monotonic()
        assert sum(short.message_tokens) == SHORT_OUTPUT, short.detail
        return ended - start

    async def prefill(self, long_prompt: int | None) -> tuple[float, float]:
        """Return the short prompt's time to first token and the running stream's longest gap, in seconds."""
        async with asyncio.TaskGroup() as tasks:
            running, _ = self.send(tasks, SHORT_PROMPT, RUNNING_OUTPUT)
            while len(running.message_seconds) < RUNNING_BEFORE:  # noqa: ASYNC110  a client that watches its own stream
                await asyncio.sleep(0.005)
            num_before = len(running.message_seconds)
            start = time.monotonic()
            if long_prompt is not None:
                self.send(tasks, long_prompt, PROBE_OUTPUT)
            short, done = self.send(tasks, SHORT_PROMPT, PROBE_OUTPUT)
            await done
            assert short.message_seconds, short.detail
        after = running.message_seconds[num_before - 1 :]
        stall = max(late - early for early, late in pairwise(after))
        return short.message_seconds[0] - start, stall


def measure_live(way: str, repetitions: int) -> list[Row]:
    """Measure every question for one way to batch, on its own cluster."""
    return asyncio.run(_measure(way, repetitions))


async def _measure(way: str, repetitions: int) -> list[Row]:
    seen: dict[tuple[str, bool], list[float]] = {}

    def note(with_long: bool, **values: float) -> None:
        for question, value in values.items():
            seen.setdefault((question, with_long), []).append(value)

    wanted = [*overrides(sections(way)), *overrides(_OWN)]
    async with LocalCluster(None, wanted) as cluster, RouterClient(cluster.router_address, TlsSettings()) as router:
        client = _Client(router)
        for _ in range(repetitions):
            ttft, stall = await client.prefill(None)
            note(False, budget=ttft, prefill=ttft, stall=stall, decode=await client.decode(with_long=False))
            ttft, stall = await client.prefill(LONG_PROMPT)
            note(True, prefill=ttft, stall=stall, decode=await client.decode(with_long=True))
            note(True, budget=(await client.prefill(FULL_PROMPT))[0])
    return [
        Row(way, question, 1e3 * median(seen[question, False]), 1e3 * median(seen[question, True]))
        for question in QUESTIONS
    ]


def overrides(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings in the form that `--set` takes."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{inner}" for inner in overrides(value))
        else:
            yield f"{key}={value}"
