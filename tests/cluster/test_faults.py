"""Faults on request, live: by settings, by an operator's call, by a request's metadata; innocent streams are exact."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from typer.testing import CliRunner

import lorrery
from lorrery.cli.faults import app
from lorrery.service.local.cluster import LocalCluster
from lorrery.v1 import router_pb2
from tests.cluster.client import TIMEOUT_SECONDS, Ask, Client, client_of, error_info
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import metric, running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

TOKENS = 24
RULES = ("refuse,adapter=lora-0,share=0.5,seed=3,status=RESOURCE_EXHAUSTED", "cut,tenant=acme,after=5,status=DATA_LOSS")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    async with running_cluster(
        folder, f"faults={list(RULES)}".replace("'", '"'), "router.request_faults=true"
    ) as cluster:
        yield cluster
        await nothing_held(cluster)


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[Client]:
    async with client_of(cluster) as client:
        yield client
        await client.stub.SetFaults(router_pb2.SetFaultsRequest(), timeout=TIMEOUT_SECONDS)


async def generate(
    client: Client, ask: Ask, *, tenant_id: str = "", faults: Sequence[str] = ()
) -> tuple[list[int], grpc.aio.AioRpcError | None]:
    """Return the token ids that came, and the error that ended them."""
    message = ask.message()
    message.tenant_id = tenant_id
    token_ids: list[int] = []
    try:
        call = client.stub.Generate(
            message, timeout=TIMEOUT_SECONDS, metadata=tuple(("lorrery-fault", fault) for fault in faults)
        )
        async for response in call:
            token_ids += response.token_ids
    except grpc.aio.AioRpcError as error:
        return token_ids, error
    return token_ids, None


async def test_a_share_of_one_adapters_requests_is_refused_the_same_as_simulated(
    cluster: LocalCluster, client: Client
) -> None:
    live: list[str] = []
    for seed in range(24):
        token_ids, error = await generate(client, Ask(seed, max_new_tokens=4, adapter_id=f"lora-{seed % 2}"))
        live.append("OK" if error is None else error.code().name)
        assert len(token_ids) == (4 if error is None else 0)
        if error is not None:
            assert error_info(error) == ("FAULT_INJECTED", {"rule": RULES[0]}, False)
    assert Counter(live[1::2]) == {"OK": 12}
    assert 2 < live.count("RESOURCE_EXHAUSTED") < 10

    requests = lorrery.Requests(range(24), [8] * 24, [4] * 24, [f"lora-{number % 2}" for number in range(24)])
    assert lorrery.simulate(cluster.settings, requests).columns.status.tolist() == live


async def test_an_operators_rules_of_every_kind_end_requests_as_simulated(
    cluster: LocalCluster, client: Client
) -> None:
    rules = [
        "refuse,tenant=other,share=0.3,seed=5,status=ABORTED",
        "cut,tenant=other,after=3,first=2",
        "delay,seconds=0.01,adapter=lora-2,first=1",
        "cut,adapter=lora-1,after=0,share=0.5,status=INTERNAL",
        "stall,after=2,seconds=0.01,share=0.4",
        "cut,after=9,first=5,for=3600",
        "cut,after=1,at=3600",
    ]
    await client.stub.SetFaults(router_pb2.SetFaultsRequest(rules=rules[:3]), timeout=TIMEOUT_SECONDS)
    await client.stub.SetFaults(router_pb2.SetFaultsRequest(rules=rules[3:], add=True), timeout=TIMEOUT_SECONDS)
    tenants, adapters = ["other", ""] * 12, ["lora-1", "lora-2", "lora-2"] * 8
    live: list[tuple[str, int]] = []
    for seed, (tenant_id, adapter_id) in enumerate(zip(tenants, adapters, strict=True)):
        ask = Ask(seed, max_new_tokens=12, adapter_id=adapter_id)
        token_ids, error = await generate(client, ask, tenant_id=tenant_id)
        live.append(("OK" if error is None else error.code().name, len(token_ids)))
    requests = lorrery.Requests(range(24), [8] * 24, [12] * 24, adapters, tenant_id=tenants)
    found = lorrery.simulate(cluster.settings, requests, faults=rules).columns
    assert live == list(zip(found.status.tolist(), found.output_tokens.tolist(), strict=True))
    assert {status for status, _ in live} == {"OK", "ABORTED", "UNAVAILABLE", "INTERNAL"}
    listed = await client.stub.ListFaults(router_pb2.ListFaultsRequest(), timeout=TIMEOUT_SECONDS)
    added = listed.faults[len(RULES) :]
    assert [rule.rule for rule in added if not rule.num_requests] == ["cut,after=1,at=3600"]


async def test_a_tenants_streams_are_cut_after_their_tokens_and_others_are_whole(
    cluster: LocalCluster, client: Client
) -> None:
    ask = Ask(7, max_new_tokens=TOKENS)
    token_ids, error = await generate(client, ask, tenant_id="acme")
    assert error is not None
    assert error.code() is grpc.StatusCode.DATA_LOSS
    assert token_ids == ask.expected(cluster.settings)[0][:5]
    token_ids, error = await generate(client, ask, tenant_id="other")
    assert error is None
    assert token_ids == ask.expected(cluster.settings)[0]


async def test_an_operator_sets_rules_that_count_and_takes_them_back(cluster: LocalCluster, client: Client) -> None:
    before = metric(cluster.metrics_address("router"), "lorrery_router_faults_total", kind="refuse")
    await client.stub.SetFaults(router_pb2.SetFaultsRequest(rules=["refuse,first=2"]), timeout=TIMEOUT_SECONDS)
    statuses = [
        error and error.code() for _, error in [await generate(client, Ask(1, max_new_tokens=1)) for _ in range(4)]
    ]
    assert statuses == [grpc.StatusCode.UNAVAILABLE] * 2 + [None] * 2
    listed = (await client.stub.ListFaults(router_pb2.ListFaultsRequest(), timeout=TIMEOUT_SECONDS)).faults
    assert [rule.rule for rule in listed] == [*RULES, "refuse,first=2"]
    assert listed[2].num_requests == 2
    after = metric(cluster.metrics_address("router"), "lorrery_router_faults_total", kind="refuse")
    assert after - before == 2
    await client.stub.SetFaults(router_pb2.SetFaultsRequest(), timeout=TIMEOUT_SECONDS)
    listed = (await client.stub.ListFaults(router_pb2.ListFaultsRequest(), timeout=TIMEOUT_SECONDS)).faults
    assert [rule.rule for rule in listed] == list(RULES)


async def test_the_command_sets_lists_and_clears(cluster: LocalCluster, client: Client) -> None:
    async def command(*arguments: str) -> str:
        given = [*arguments, "--target", cluster.router_address]
        result = await asyncio.to_thread(CliRunner().invoke, app, given)
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output

    assert "refuse,first=1" in await command("set", "refuse,first=1", "delay,seconds=0.01")
    assert (await generate(client, Ask(1)))[1] is not None
    shown = await command("add", "cut,tenant=acme,after=1", "refuse,first=1", "slow_worker,worker=worker-9,factor=2")
    assert re.search(r"refuse,first=1 .* 1 ", shown)
    assert "cut,tenant=acme,after=1" in shown
    assert re.search("worker=worker-9,factor=2 .* waits for a worker of that name", await command("list"))
    cleared = await command("clear")
    assert "refuse,first=1" not in cleared
    assert RULES[1] in cleared


async def test_the_command_says_where_faults_are_set_if_it_is_given_the_port_of_http(cluster: LocalCluster) -> None:
    given = ["list", "--target", cluster.http_address]
    result = await asyncio.to_thread(CliRunner().invoke, app, given)
    assert str(result.exception).startswith(
        f"{cluster.http_address} serves HTTP, and faults are set over Lorrery's own"
    )
    assert "the ready line of lorrery serve" in str(result.exception)


async def test_rules_are_added_to_those_that_hold_which_count_on(cluster: LocalCluster, client: Client) -> None:
    async def take(*rules: str) -> None:
        await client.stub.SetFaults(router_pb2.SetFaultsRequest(rules=rules, add=True), timeout=TIMEOUT_SECONDS)

    async def num_met() -> dict[str, int]:
        answer = await client.stub.ListFaults(router_pb2.ListFaultsRequest(), timeout=TIMEOUT_SECONDS)
        return {rule.rule: rule.num_requests for rule in answer.faults[len(RULES) :]}

    await take("refuse,first=2")
    assert (await generate(client, Ask(1)))[1] is not None
    await take("refuse,first=2", "cut,after=1,status=ABORTED")
    codes = [error and error.code() for _, error in [await generate(client, Ask(1)) for _ in range(2)]]
    assert codes == [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED]
    assert await num_met() == {"refuse,first=2": 2, "cut,after=1,status=ABORTED": 1}
    with pytest.raises(grpc.aio.AioRpcError, match="2 faults hold and 63 are to be added; at most 64 at once"):
        await take(*(f"delay,seconds=1,tenant=t{number}" for number in range(63)))
    await take("freeze_worker,worker=late,at=5")
    with pytest.raises(grpc.aio.AioRpcError, match="begins before freeze_worker,worker=late,at=5 is over"):
        await take("freeze_worker,worker=late,at=9")
    assert list(await num_met()) == ["refuse,first=2", "cut,after=1,status=ABORTED", "freeze_worker,worker=late,at=5"]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("refuse,frist=1", "'frist=1'; refuse has adapter, at, first, for, seed, share, status, tenant"),
        ("refuse,status=OK", "status is 'OK'; it must be one of CANCELLED"),
        ("cut,after=-1", "after is '-1'; it must be a whole number, 0 or more"),
        ("stall,after=3", "seconds is missing"),
        ("freeze_worker", "worker is missing"),
        ("stall,after=3,seconds=1,worker=worker-0", "before a worker is, .* freeze_worker, .* have a worker"),
        ("adapter_load_failure,factor=2", "adapter_load_failure has adapter, at, first, for, seed, share, worker"),
    ],
)
async def test_an_operators_rule_that_is_none_is_refused_and_changes_nothing(
    client: Client, rule: str, message: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        await client.stub.SetFaults(
            router_pb2.SetFaultsRequest(rules=["delay,seconds=9", rule]), timeout=TIMEOUT_SECONDS
        )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    listed = (await client.stub.ListFaults(router_pb2.ListFaultsRequest(), timeout=TIMEOUT_SECONDS)).faults
    assert len(listed) == len(RULES)


async def test_a_request_asks_for_its_own_faults(cluster: LocalCluster, client: Client) -> None:
    ask = Ask(11, max_new_tokens=TOKENS)
    began = time.monotonic()
    token_ids, error = await generate(client, ask, faults=["delay,seconds=0.3", "stall,after=2,seconds=0.4"])
    assert error is None
    assert time.monotonic() - began >= 0.7
    assert token_ids == ask.expected(cluster.settings)[0]
    token_ids, error = await generate(client, ask, faults=["cut,after=0,status=ABORTED"])
    assert error is not None
    assert (token_ids, error.code()) == ([], grpc.StatusCode.ABORTED)
    _, error = await generate(client, ask, faults=["worker_loss,worker=worker-0"])
    assert error is not None
    assert "worker_loss is no fault of requests" in (error.details() or "")


async def test_a_request_may_not_ask_where_the_settings_do_not_allow_it(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster, client_of(cluster) as client:
        _, error = await generate(client, Ask(1), faults=["refuse"])
        assert error is not None
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "set router.request_faults" in (error.details() or "")
