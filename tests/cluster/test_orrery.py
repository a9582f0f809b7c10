"""What watchers see of a cluster of real processes."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from playwright.async_api import async_playwright

from lab.screenshots.browser import chromium
from lorrery.service.errors import LorreryError
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.web.server import WebServer
from lorrery.view.app import make_app
from lorrery.view.frame import Frame
from lorrery.view.wire import LiveFeed
from tests.browser import expect_async as expect
from tests.cluster.client import Ask, Client, Stream, client_of
from tests.cluster.harness import running_cluster
from tests.cluster.test_shards import _add_shard
from tests.needs import needs_chromium
from tests.router.test_access import ROOT, entry
from tests.view.top.terminal import Terminal

pytestmark = pytest.mark.cluster

NUM_FRAMES = 1200
"""A minute of them: a bound for what must be seen."""
TENANT = '</script> "Ünï" 🪐'


@contextlib.asynccontextmanager
async def in_a_terminal(address: str) -> AsyncIterator[Terminal]:
    with contextlib.closing(Terminal(["--target", address], columns=120)) as terminal:
        await shown(terminal, "worker-0", "worker-1", "live")
        yield terminal


async def shown(terminal: Terminal, *words: str) -> None:
    await asyncio.to_thread(terminal.until, *words)


class Watch:
    """Reads frames, and keeps what they bring."""

    def __init__(self, frames: AsyncIterator[Frame]) -> None:
        self._frames = frames
        self.tenants: list[str] = []
        self.adapters: list[str] = []
        self.events: list[str] = []
        self.last: Frame | None = None

    async def until(self, seen: Callable[[Frame], bool]) -> Frame:
        for _ in range(NUM_FRAMES):
            frame = await anext(self._frames)
            assert self.last is None or frame.at > self.last.at
            assert self.last is None or frame.totals.output_tokens >= self.last.totals.output_tokens
            self.last = frame
            self.tenants += frame.tenants_new
            self.adapters += frame.adapters_new
            self.events += [event.kind for event in frame.events]
            if seen(frame):
                return frame
        raise AssertionError(f"not seen within {NUM_FRAMES} frames; the last one: {self.last}")


@contextlib.asynccontextmanager
async def watched(address: str, api_key: str = "") -> AsyncIterator[Watch]:
    async with LiveFeed(address, api_key=api_key) as feed, contextlib.aclosing(feed.frames(20)) as frames:
        yield Watch(frames)


@needs_chromium
async def test_requests_workers_and_schedulers_are_seen_as_they_come_and_go(tmp_path: Path):
    async with (
        running_cluster(tmp_path, num_workers=2) as cluster,
        client_of(cluster) as client,
        in_a_terminal(cluster.router_address) as terminal,
    ):
        async with LiveFeed(cluster.router_address) as feed:
            hello = await feed.hello()
        assert (hello.source, hello.model, hello.time_scale) == ("live", "Llama-3-8B", 1.0)
        async with watched(cluster.router_address) as watch:
            await watch.until(lambda frame: len(frame.workers) == 2)
            ask = Ask(seed=1, max_new_tokens=800, adapter_id="lora-1")
            message = ask.message()
            message.tenant_id = TENANT
            stream = Stream(ask, client.stub.Generate(message, timeout=60))
            client.streams.append(stream)
            frame = await watch.until(
                lambda frame: any(w.running and w.running[0].output_tokens for w in frame.workers)
            )
            (busy,) = [worker for worker in frame.workers if worker.running]
            row = busy.running[0]
            assert (watch.adapters[row.adapter], watch.tenants[row.tenant]) == ("lora-1", TENANT)
            assert (busy.gpu, busy.kind, busy.state) == ("H100-SXM", "decode", "ready")
            assert busy.step > 0
            await shown(terminal, busy.id, "decode")
            cluster.kill(busy.id)
            frame = await watch.until(lambda frame: len(frame.workers) == 1 and bool(frame.workers[0].running))
            assert frame.workers[0].running[0].request == row.request
            assert watch.events.count("worker_joined") == 2
            assert watch.events.count("worker_lost") == 1
            await shown(terminal, f"{busy.id} has been gone")
            terminal.press("3")
            await shown(terminal, TENANT)
            terminal.press("2")
            await shown(terminal, "lora-1")
            await cluster.restart(busy.id)
            await watch.until(lambda frame: len(frame.workers) == 2)
            await stream
            await watch.until(lambda frame: frame.totals.finished == 1)
        await _look_at_the_page(cluster, client)
        async with watched(await _add_shard(cluster)) as watch:
            frame = await watch.until(lambda frame: len(frame.workers) == 3)
            assert [shard.connected for shard in frame.shards] == [True, True]
            cluster.kill("scheduler-1")
            frame = await watch.until(lambda frame: not frame.shards[1].connected)
            assert {worker.shard for worker in frame.workers} == {0}
            await cluster.restart("scheduler-1")
            await watch.until(lambda frame: frame.shards[1].connected and len(frame.workers) == 3)
        cluster.kill("router")
        await shown(terminal, "LOST, trying again")
        await cluster.restart("router")
        await shown(terminal, "live")
        terminal.press("q")
        assert (await asyncio.to_thread(terminal.end))[0] == 0
        assert terminal.is_as_before()


async def _look_at_the_page(cluster: LocalCluster, client: Client) -> None:
    """Open the page of a cluster of two workers, follow a request on it, and end its worker."""
    complaints: list[str] = []
    async with _page(cluster.router_address) as url, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = await browser.new_page(reduced_motion="reduce")
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(url)
        await expect(page.locator("#connection")).to_have_text("live")
        await expect(page.get_by_role("list", name="Workers").get_by_role("button")).to_have_count(2)
        ask = Ask(seed=2, max_new_tokens=1000, adapter_id="lora-1")
        message = ask.message()
        message.tenant_id = TENANT
        stream = Stream(ask, client.stub.Generate(message, timeout=60))
        client.streams.append(stream)
        await expect(page.locator("#table-tenants")).to_contain_text(TENANT)
        busy = page.get_by_role("button", name=re.compile("1 request running"))
        await busy.click()
        await expect(page.locator("#details")).to_contain_text("H100-SXM")
        await page.locator("#details").get_by_role("button", name="lora-1").click()
        await expect(page.locator("#details h2")).to_contain_text("Adapter")
        await page.keyboard.press("Escape")
        name = str(await busy.get_attribute("aria-label")).partition(":")[0]
        cluster.kill(name)
        await expect(page.locator("#notices")).to_contain_text(f"{name} has been gone")
        await cluster.restart(name)
        await expect(page.locator("#notices")).to_contain_text("lost in the last 5 min, and back or replaced since")
        await expect(page.locator("#notices")).not_to_contain_text("has been gone")
        await stream
        await page.get_by_role("button", name=TENANT).click()
        await expect(page.locator(".requests")).to_contain_text("lora-1")
        await browser.close()
    assert complaints == []


@contextlib.asynccontextmanager
async def _page(router: str) -> AsyncIterator[str]:
    async with LiveFeed(router) as feed:
        server = WebServer(make_app(feed), "127.0.0.1:0", "--port")
        address = server.listen()
        serving = asyncio.create_task(server.run())
        try:
            yield f"http://{address}/"
        finally:
            serving.cancel()
            await asyncio.wait([serving])


async def test_only_an_operator_watches(tmp_path: Path):
    keys = tmp_path / "keys.toml"
    keys.write_text(ROOT + entry("acme-secret", name="acme", tenant="acme"))
    async with running_cluster(tmp_path, f"router.keys={keys}", num_workers=0) as cluster:
        for key, word in (("", "UNAUTHENTICATED"), ("acme-secret", "an operator's may")):
            async with watched(cluster.router_address, key) as watch:
                with pytest.raises(LorreryError, match=word):
                    await watch.until(lambda _frame: True)
        async with watched(cluster.router_address, "root-secret") as watch:
            await watch.until(lambda frame: frame.shards[0].connected)
            keys.write_text(entry("other-secret", name="other", tenant="acme", operator=True))
            with pytest.raises(LorreryError, match="has been taken back"):
                await watch.until(lambda _frame: False)
