"""The gateway smg before two engines, which are two routers of one cluster; OpenAI's package calls it."""

import asyncio
import json
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError, RateLimitError

from lorrery.service.local.cluster import LocalCluster
from lorrery.tokenizer.file import open_tokenizer
from lorrery.v1 import router_pb2, router_pb2_grpc
from tests.cluster.client import TIMEOUT_SECONDS, Ask, text_of
from tests.cluster.gauges import nothing_held, scrape
from tests.cluster.harness import running_cluster, wait_until
from tests.ports import held_ports

SMG = Path(sys.executable).with_name("smg")
ENGINES = ("router", "router-1")
MODEL, ADAPTER = "Llama-3-8B", "lora-0"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not SMG.exists(), reason="smg has a wheel for Linux on x86-64 only"),
]


@dataclass
class Gateway:
    """The gateway, its engines, and a client of it."""

    cluster: LocalCluster
    url: str
    openai: AsyncOpenAI

    async def served(self) -> list[float]:
        """Return how many requests each engine has ended well."""
        return [await scrape(self.cluster, name, "lorrery_router_requests_total", outcome="ok") for name in ENGINES]

    async def faults(self, *rules: str) -> None:
        """Let both engines have these faults only."""
        for name in ENGINES:
            async with grpc.aio.insecure_channel(self.cluster.processes[name].grpc) as channel:
                stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
                await stub.SetFaults(router_pb2.SetFaultsRequest(rules=rules), timeout=TIMEOUT_SECONDS)

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a GET; 0: nobody answers."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=TIMEOUT_SECONDS) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except OSError:
            return 0, b""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway that is ready, one adapter's port included; round robin, and no retries, which would hide failures."""
    folder, engine = tmp_path_factory.mktemp("cluster"), "router.smg_vllm_grpc=127.0.0.1:0"
    by_adapter = f'{{ protocol = "smg-vllm", listen = "127.0.0.1:0", adapter = "{ADAPTER}" }}'
    with held_ports(2) as (port, metrics_port):
        async with running_cluster(folder, engine, f"router.engines=[{by_adapter}]") as cluster:
            await cluster.add("router-1", "router", [f'router.schedulers=["{cluster.scheduler_address}"]'])
            await cluster.serving("router-1")
            urls = [f"grpc://{cluster.processes[name].others['smg_vllm_grpc']}" for name in ENGINES]
            urls.append(f"grpc://{cluster.engine_addresses['engines[0]']}")
            url = f"http://127.0.0.1:{port}"
            log = (folder / "smg.log").open("wb")
            process = await asyncio.create_subprocess_exec(
                *(str(SMG), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--disable-retries"),
                *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
                *("--worker-urls", *urls),
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
            )
            log.close()
            client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_SECONDS)
            try:
                async with client:
                    gateway = Gateway(cluster, url, client)
                    await wait_until(lambda: both_ready(gateway), 60)
                    yield gateway
                await nothing_held(cluster, without=["router-1"])  # which a test has killed
            finally:
                process.send_signal(signal.SIGKILL)
                await process.wait()
                print((folder / "smg.log").read_text(errors="replace")[-4000:])


async def both_ready(gateway: Gateway) -> bool:
    """Whether the gateway sends requests to either engine."""
    ready, _ = await asyncio.to_thread(gateway.get, "/readiness")
    _, body = await asyncio.to_thread(gateway.get, "/workers")
    return ready == 200 and [worker["status"] for worker in json.loads(body)["workers"]] == ["ready"] * 3


async def test_both_engines_serve_what_the_gateway_lists(gateway: Gateway) -> None:
    assert {model.id for model in (await gateway.openai.models.list()).data} == {MODEL, ADAPTER}
    before = await gateway.served()
    for _ in range(4):
        answer = await gateway.openai.completions.create(model=MODEL, prompt="hello world", max_tokens=5, n=2)
        assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
        assert [len(open_tokenizer(None).encode_stop(choice.text)) for choice in answer.choices] == [5, 5]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 10
    assert [now - then for now, then in zip(await gateway.served(), before, strict=True)] == [4, 4]  # 2 x 2 outputs


async def test_a_gateway_makes_the_model_call_tools(gateway: Gateway) -> None:
    """The gateway asks its engines for a form, and reads the calls itself."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools: Any = [
        {"type": "function", "function": {"name": "weather", "parameters": city}},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ]
    seen = set[str]()
    for choice in (*["required"] * 6, {"type": "function", "function": {"name": "weather"}}):
        chat = await gateway.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], tools=tools, tool_choice=choice
        )
        calls: Any = chat.choices[0].message.tool_calls
        assert calls
        for call in calls:
            assert set(json.loads(call.function.arguments)) == ({"city"} if call.function.name == "weather" else set())
            seen.add(call.function.name)
    assert seen == {"weather", "now"}
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": city}}
    chat = await gateway.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], response_format=form
    )
    assert set(json.loads(chat.choices[0].message.content or "")) == {"city"}


async def test_a_stream_of_a_chat_has_every_token(gateway: Gateway) -> None:
    stream = await gateway.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello world"}],
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, reasons, usage = "", [], None
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        usage = chunk.usage or usage
    assert len(open_tokenizer(None).encode_stop(text)) == 9
    assert reasons == ["length"]
    assert usage is not None
    assert usage.completion_tokens == 9


async def test_a_seed_reproduces_and_a_stop_string_ends_the_output_at_the_engine(gateway: Gateway) -> None:
    async def text(**fields: object) -> tuple[str, str, int]:
        body = {"seed": 7, "ignore_eos": True}
        answer = await gateway.openai.completions.create(
            model=MODEL, prompt="hello world", max_tokens=12, extra_body=body | fields
        )
        assert answer.usage is not None
        return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens

    whole, reason, _ = await text()
    assert (await text())[:2] == (whole, reason) == (whole, "length")
    words = whole.split()
    stop = f" {words[4]} {words[5]}"
    assert await text(stop=[stop]) == (whole[: whole.index(stop)], "stop", 6)


async def test_an_adapter_with_a_port_of_its_own_is_a_model(gateway: Gateway) -> None:
    body = {"seed": 7, "ignore_eos": True}
    answer = await gateway.openai.completions.create(model=ADAPTER, prompt="hello", max_tokens=6, extra_body=body)
    token_ids, _ = Ask(seed=7, max_new_tokens=6, adapter_id=ADAPTER).expected(gateway.cluster.settings)
    assert answer.choices[0].text == text_of(token_ids)


async def test_what_can_never_fit_is_400_and_what_is_refused_for_now_429(gateway: Gateway) -> None:
    with pytest.raises(BadRequestError, match="max_req_total_len"):
        await gateway.openai.completions.create(model=MODEL, prompt="hello", max_tokens=9000)
    await gateway.faults("refuse,status=RESOURCE_EXHAUSTED")
    with pytest.raises(RateLimitError, match="injected fault"):
        await gateway.openai.completions.create(model=MODEL, prompt="hello", max_tokens=2)
    await gateway.faults()


async def test_a_client_that_goes_leaves_nothing_behind(gateway: Gateway) -> None:
    async def ended(outcome: str) -> float:
        counts = [await scrape(gateway.cluster, name, COUNTER, outcome=outcome) for name in ENGINES]
        return sum(counts)

    aborted, cancelled = await ended("aborted"), await ended("cancelled")
    long = {"model": MODEL, "prompt": "hello", "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    stream = await gateway.openai.completions.create(**long, stream=True)
    await anext(aiter(stream))
    await stream.close()  # the gateway sends an Abort
    await nothing_held(gateway.cluster)
    plain = asyncio.create_task(gateway.openai.completions.create(**long))
    await wait_until(lambda: open_requests(gateway))
    plain.cancel()  # the gateway cancels its call, or aborts it if the answer had begun
    await nothing_held(gateway.cluster)
    assert await ended("aborted") >= aborted + 1
    assert await ended("aborted") + await ended("cancelled") == aborted + cancelled + 2


COUNTER = "lorrery_router_requests_total"


async def open_requests(gateway: Gateway) -> bool:
    """Whether an engine has a request."""
    counts = [await scrape(gateway.cluster, name, "lorrery_router_in_flight_requests") for name in ENGINES]
    return sum(counts) == 1


async def test_when_an_engine_is_killed_the_other_serves(gateway: Gateway) -> None:
    gateway.cluster.kill("router-1")

    async def served() -> bool:
        try:
            await gateway.openai.completions.create(model=MODEL, prompt="hello", max_tokens=1)
        except Exception:  # while the gateway still has the engine in its rotation
            return False
        return True

    async def three_in_a_row() -> bool:
        return [await served() for _ in range(3)] == [True] * 3

    await wait_until(three_in_a_row)
