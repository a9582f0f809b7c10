"""Live engines behind the gateway smg, and a client that may choose the engine of each request.

Each engine is a scheduler, a worker and a router with ports of their own. Over HTTP smg passes any `model` on, so
adapters are named as models. A rule of `lab.studies.routing` names the engine in smg's header `x-smg-target-worker`,
which its policy consistent_hashing follows: whoever chooses, all requests take the same way.
"""

import asyncio
import contextlib
import json
import re
import socket
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import lorrery
from lab.studies.routing import SCRAPE_SECONDS, Engine, Rule
from lorrery.loadgen.driver import Driver, DriveSettings
from lorrery.loadgen.http.client import HttpClient
from lorrery.loadgen.http.routes import Completions
from lorrery.loadgen.metrics import LoadMetrics
from lorrery.loadgen.reception import Ask, Reception, Send
from lorrery.loadgen.source import build_workload
from lorrery.loadgen.workload.outcome import OutcomeTable
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.local.processes import ForkServer
from lorrery.service.settings.sections import TlsSettings
from lorrery.service.telemetry.metrics import new_registry

SMG = Path(sys.executable).with_name("smg")


class Series:
    """What a rule sees of live engines; `scrape` reads it from the workers' `/metrics`.

    Args:
        addresses: HOST:PORT of each worker's metrics.
    """

    _HELD = re.compile(r'^vllm:lora_adapter_loaded\{adapter_name="([^"]*)".*level="(gpu|cpu)".*\} 1', re.MULTILINE)
    _RUNNING = re.compile(r'^vllm:lora_requests_info\{.*running_lora_adapters="([^"]*)".*\} (.*)$', re.MULTILINE)
    _COUNTS = re.compile(r"^vllm:(lora_adapter_load_seconds_count|request_success_total)\{.*\} (.*)$", re.MULTILINE)

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self.engines = [Engine() for _ in addresses]
        self.load, self.sent = [0] * len(addresses), [0] * len(addresses)

    async def scrape(self) -> None:
        """Read the adapters of each engine."""
        for number, text in enumerate(await asyncio.gather(*map(_metrics, self._addresses))):
            held: dict[str, set[str]] = {"gpu": set(), "cpu": set()}
            for name, level in self._HELD.findall(text):
                held[level].add(name)
            _, running = max((float(at), names) for names, at in self._RUNNING.findall(text))
            self.engines[number] = Engine(0, 0, set(running.split(",")), held["gpu"], held["cpu"] - held["gpu"])

    async def keep_scraping(self) -> None:
        """Scrape until cancelled."""
        while True:
            await asyncio.gather(self.scrape(), asyncio.sleep(SCRAPE_SECONDS))

    async def counts(self) -> tuple[float, list[float]]:
        """Return the number of adapter loads, and of requests served by each engine."""
        loads, served = 0.0, [0.0] * len(self._addresses)
        for number, text in enumerate(await asyncio.gather(*map(_metrics, self._addresses))):
            for name, value in self._COUNTS.findall(text):
                if name == "request_success_total":
                    served[number] += float(value)
                else:
                    loads += float(value)
        return loads, served

    def choose(self, rule: Rule, adapter: str) -> int:
        """Return the engine by a rule."""
        seen = zip(self.engines, self.load, self.sent, strict=True)
        return rule(adapter, [Engine(load, sent, one.running, one.gpu, one.host) for one, load, sent in seen])


async def _metrics(address: str) -> str:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return text


class GatewayClient(HttpClient):
    """A client of smg that adds a header to each request, chosen when it is sent.

    Args:
        url: smg's.
        series: of the engines.
        rule: names the engine; None: smg chooses, by the adapter if its policy reads routing keys.
    """

    def __init__(self, url: str, series: Series, rule: Rule | None) -> None:
        super().__init__(url, Completions(), TlsSettings())
        self._series, self._rule, self._always = series, rule, self._headers

    def prepare(self, ask: Ask) -> Send:
        """See `Client.prepare`."""
        adapter = ask.request.adapter_id or ""

        async def send(reception: Reception, on_tokens: Callable[[int], None]) -> None:
            if self._rule is None:
                self._headers = f"{self._always}x-smg-routing-key: {adapter}\r\n"
                await super(GatewayClient, self).prepare(ask)(reception, on_tokens)
                return
            number = self._series.choose(self._rule, adapter)
            self._headers = f"{self._always}x-smg-target-worker: {number}\r\n"
            self._series.sent[number] += 1
            self._series.load[number] += 1
            try:
                await super(GatewayClient, self).prepare(ask)(reception, on_tokens)
            finally:
                self._series.load[number] -= 1

        return send


@contextlib.asynccontextmanager
async def gateway(urls: Sequence[str], policy: str, *flags: str) -> AsyncIterator[str]:
    """Run smg before these engines; yield its URL once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics_port = one.getsockname()[1], other.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(str(SMG), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", policy, *flags),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--log-level", "error"),
        *("--disable-retries", "--worker-startup-check-interval", "1", "--worker-urls", *urls),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )

    def ready() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readiness") as answer:
            return bool(json.loads(answer.read()).get("healthy_workers") == len(urls))
        return False

    try:
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(ready):  # noqa: ASYNC110  another process's state
                await asyncio.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


def _engine_of(url: str, model: str, number: int) -> str:
    """Ask smg for one token of the engine with this number; return the engine's URL."""
    request = urllib.request.Request(  # noqa: S310
        f"{url}/v1/completions",
        json.dumps({"model": model, "prompt": "hello", "max_tokens": 1}).encode(),
        {"content-type": "application/json", "x-smg-target-worker": str(number)},
    )
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        return str(answer.headers["x-smg-routed-worker-id"])


async def serve(
    settings: str,
    num_engines: int,
    router: str | Rule,
    workload: lorrery.LoadOptions,
    fork_server: ForkServer,
) -> tuple[lorrery.RequestColumns, float, list[float]]:
    """Run engines and smg, and send the requests.

    Args:
        settings: text of each engine's settings file.
        num_engines: of one worker each, which begin without adapters.
        router: a policy of smg's, with its own defaults; or a rule, under which smg takes no engine out of rotation.
        workload: the requests.
        fork_server: of the engines' processes.

    Returns:
        The requests, the number of adapter loads, and how many requests each engine served.
    """
    rule = None if isinstance(router, str) else router
    policy = (router,) if isinstance(router, str) else ("consistent_hashing", "--disable-worker-overload-protection")
    async with contextlib.AsyncExitStack() as stack:
        config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "engine.toml"
        config.write_text(settings, encoding="utf-8")
        clusters = [LocalCluster(config, free_ports=True, fork_server=fork_server) for _ in range(num_engines)]
        for cluster in clusters:
            await stack.enter_async_context(cluster)
        by_url = {f"http://{one.http_address}": one.metrics_address("worker-0") for one in clusters}
        url = await stack.enter_async_context(gateway(list(by_url), *policy))
        urls = list(by_url)
        if rule is not None:  # smg numbers engines in the order in which they registered
            model = clusters[0].settings.model
            urls = [await asyncio.to_thread(_engine_of, url, model, number) for number in range(num_engines)]
        series = Series([by_url[one] for one in urls])
        loads_before, served_before = await series.counts()
        client = await stack.enter_async_context(GatewayClient(url, series, rule))
        await client.cluster(10)
        driver = Driver(client, DriveSettings(workload.seed), 1.0, LoadMetrics(new_registry("loadgen")))
        scraping = asyncio.create_task(series.keep_scraping())
        try:
            await driver.run(build_workload(workload, []).requests)
        finally:
            scraping.cancel()
        await asyncio.sleep(2.0)  # a worker's counters come with its heartbeat
        loads, served = await series.counts()
    columns = lorrery.RequestColumns.of(OutcomeTable.of(driver.outcomes))
    return columns, loads - loads_before, [now - then for now, then in zip(served, served_before, strict=True)]
