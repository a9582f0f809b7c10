"""docs/figures/orrery.png: the page of a cluster that has something to show.

Six workers on one machine, each with room for six adapters; `acme` and `globex` send a steady stream for a few, and
`research` too much for many. So there is a queue, adapters come and go, and the page has something to say.
"""

import asyncio
import contextlib
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import numpy as np
from playwright.sync_api import Page, expect

from lab.screenshots.browser import browser, page_of
from lorrery.v1 import router_pb2, router_pb2_grpc, types_pb2

SECONDS = 40
"""How long the load runs before the first picture: TTFT, shares and the strips need some."""
WIDTH, HEIGHT = 1440, 900
NUM_WORKERS = 6
SETTINGS = """
format = 1
model = "Llama-3-8B"

[adapters]
max_loras = 6
registry = [
  { id = "sql", rank = 16, count = 6 },
  { id = "chat", rank = 32, count = 6 },
  { id = "code", rank = 64, count = 20 },
]

[scheduler]
policy = "fcfs"
max_num_seqs = 16
max_req_input_len = 4096
max_req_total_len = 6144

[worker]
gpu = "A10G"
"""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who sends what: requests a second, for the first adapters of a family, with so many tokens."""

    name: str
    rate: float
    family: str
    num_adapters: int
    prompt_tokens: int
    output_tokens: int


TENANTS = [
    Tenant("acme", 2.0, "sql", 6, 300, 160),
    Tenant("globex", 1.5, "chat", 6, 500, 200),
    Tenant("research", 10.0, "code", 20, 800, 240),
]


def take(folder: Path) -> list[Path]:
    """Take the picture; returns its path."""
    with (
        browser() as running,
        _cluster() as (router, url),
        _load(router),
        page_of(running, url, width=WIDTH, height=HEIGHT, dark=True) as page,
    ):
        expect(page.locator("#connection")).to_have_text("live")
        page.wait_for_timeout(SECONDS * 1000)
        return [_picture(page, folder / "orrery.png")]


def _picture(page: Page, path: Path) -> Path:
    """Take one picture; in a window of another size the page draws finely again, as it does not on a slow machine."""
    for height in (HEIGHT + 1, HEIGHT):
        page.set_viewport_size({"width": WIDTH, "height": height})
    page.wait_for_timeout(400)
    page.screenshot(path=path)
    return path


@contextlib.contextmanager
def _cluster() -> Iterator[tuple[str, str]]:
    """Run `lorrery up`; yields the router's address and the page's."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "cluster.toml")
        settings.write_text(SETTINGS, encoding="utf-8")
        command = [sys.executable, "-m", "lorrery.cli", "up", "--config", str(settings), "--free-ports"]
        with subprocess.Popen(  # noqa: S603 - our own command
            [*command, "--workers", str(NUM_WORKERS)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as up:
            assert up.stdout is not None
            said = ""
            try:
                for line in up.stdout:
                    said += line
                    if "try: lorrery load" in line:
                        break
                router, page = re.search(r"--target (\S+)", said), re.search(r"(http://\S+:\d+)/?\s", said)
                if router is None or page is None:
                    raise RuntimeError(f"lorrery up did not say where it is:\n{said}")
                drain = threading.Thread(target=up.stdout.read)
                drain.start()
                yield router[1], page[1]
            finally:
                up.terminate()


@contextlib.contextmanager
def _load(router: str) -> Iterator[None]:
    """Send the tenants' requests, from a thread."""
    loop = asyncio.new_event_loop()
    sending = loop.create_task(_send(router))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(sending)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(sending.cancel)
        thread.join()
        loop.close()


async def _send(router: str) -> None:
    async with grpc.aio.insecure_channel(router) as channel, asyncio.TaskGroup() as group:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        for number, tenant in enumerate(TENANTS):
            group.create_task(_stream(stub, tenant, group, np.random.default_rng(number)))


async def _stream(
    stub: "router_pb2_grpc.RouterServiceAsyncStub", tenant: Tenant, group: asyncio.TaskGroup, rng: np.random.Generator
) -> None:
    """Send one tenant's requests at random times, as a Poisson process."""

    async def ask(request: router_pb2.GenerateRequest) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in stub.Generate(request):
                pass

    while True:
        await asyncio.sleep(rng.exponential(1 / tenant.rate))
        adapter = min(int(rng.exponential(tenant.num_adapters / 3)), tenant.num_adapters - 1)
        prompt = max(16, int(rng.gamma(2, tenant.prompt_tokens / 2)))
        output = max(8, int(rng.gamma(2, tenant.output_tokens / 2)))
        request = router_pb2.GenerateRequest(
            token_ids=router_pb2.TokenIds(ids=rng.integers(1000, 30000, prompt).tolist()),
            adapter_id=f"{tenant.family}-{adapter}",
            tenant_id=tenant.name,
            sampling=types_pb2.SamplingParams(ignore_eos=True, max_new_tokens=output),
        )
        group.create_task(ask(request))
