"""Pages of other sites get nothing from a cluster without credentials, in a browser that they have rebound to it.

Chromium takes evil.example for 127.0.0.1 here, as it would once the owner of that name has changed its DNS entry.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping

import pytest
import pytest_asyncio
from playwright.async_api import Page, async_playwright

from lab.screenshots.browser import chromium
from lorrery.service.local.cluster import LocalCluster
from tests.browser import PATIENCE_MS
from tests.cluster.harness import fork_server, metric, write_settings
from tests.needs import needs_chromium

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module"), needs_chromium]

COMPLETION = {"model": "Llama-3-8B", "prompt": "x", "max_tokens": 1}
CALLS: list[tuple[str, str, object]] = [
    ("http", "/v1/completions", COMPLETION),
    ("http", "/v1/load_lora_adapter", {"lora_name": "stolen", "lora_path": "/etc"}),
    ("http", "/v1/models", None),
    ("http", "/metrics", None),
    ("router", "/metrics", None),
    ("scheduler", "/metrics", None),
    ("worker-0", "/metrics", None),
    ("page", "/hello", None),
    ("page", "/", None),
]
ASK = """async ([url, body]) => {
  const options = body && {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)};
  try {
    const answer = await fetch(url, options ?? {});
    return [answer.status, (await answer.text()).slice(0, 100)];
  } catch (error) {
    return [0, String(error)];
  }
}"""


def _ports(cluster: LocalCluster) -> Mapping[str, str]:
    """Return the port of each HTTP server."""
    addresses = {name: process.metrics for name, process in cluster.processes.items() if process.metrics}
    addresses |= {"http": cluster.processes["router"].http, "page": cluster.processes["web"].http}
    return {name: address.rpartition(":")[2] for name, address in addresses.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    cluster = LocalCluster(
        write_settings(tmp_path_factory.mktemp("cluster")),
        ["allowed_hosts=['friend.example']"],
        num_workers=1,
        free_ports=True,
        fork_server=fork_server(),
        page=True,
    )
    async with cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def page() -> AsyncIterator[Page]:
    """A page of a browser that takes two names for this machine."""
    rules = "MAP evil.example 127.0.0.1, MAP friend.example 127.0.0.1"
    async with async_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", f"--host-resolver-rules={rules}"]
        browser = await playwright.chromium.launch(executable_path=chromium(), args=arguments)
        page = await browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        yield page
        await browser.close()


async def _tried(page: Page, cluster: LocalCluster, name: str) -> dict[tuple[str, str], tuple[int, str]]:
    """Return what each server answers a page of its own port under `name`."""
    found = {}
    for server, path, body in CALLS:
        origin = f"http://{name}:{_ports(cluster)[server]}"
        await page.goto(f"{origin}/no-such-page")  # whatever it is, it is a page of this origin
        status, text = await page.evaluate(ASK, [origin + path, body])
        found[server, path] = (status, text)
    return found


async def test_a_rebound_name_gets_nothing(cluster: LocalCluster, page: Page) -> None:
    before = metric(cluster.metrics_address("router"), "lorrery_router_requests_total")
    for call, (status, text) in (await _tried(page, cluster, "evil.example")).items():
        assert (status, "evil.example" in text) == (421, True), (call, text)
    assert metric(cluster.metrics_address("router"), "lorrery_router_requests_total") == before


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "app.localhost", "friend.example"])
async def test_known_names_and_addresses_get_everything(cluster: LocalCluster, page: Page, name: str) -> None:
    found = await _tried(page, cluster, name)
    refused = found.pop(("http", "/v1/load_lora_adapter"))
    assert refused[0] in (400, 404), refused  # it is let in, and there is no adapter
    assert {status for status, _ in found.values()} == {200}, found


async def test_a_page_of_another_site_sends_nothing(cluster: LocalCluster) -> None:
    """It gets no answers anyway, since its browser withholds them, but what it sends would have an effect."""
    for server, path, body in CALLS:
        content = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        reader, writer = await asyncio.open_connection("127.0.0.1", _ports(cluster)[server])
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        answer = await reader.read()
        writer.close()
        assert answer.split()[1] == b"403", answer
        assert b"pages of 'http://evil.example' may send nothing here" in answer
