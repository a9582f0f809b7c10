"""What must hold of every run, however it went."""

import asyncio
from collections.abc import Collection

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from lorrery.router.session import Session
from lorrery.scheduler.core.cluster_facts import Placed, Withdrawn
from lorrery.scheduler.liveness import Loss
from lorrery.scheduler.routers import LiveRequest
from lorrery.scheduler.workers import Dispatcher
from tests.cluster.client import Ask
from tests.cluster.gauges import HELD
from tests.virtual.clients import Request
from tests.virtual.processes import Process
from tests.virtual.scenario import Scenario
from tests.virtual.trouble import before
from tests.virtual.ways import LATE

QUIET_SECONDS = 20.0
"""Within so long after the last stream has ended everybody is connected again, and nothing is left of any."""


async def judge(scenario: Scenario) -> list[str]:
    """Return what is wrong with a run that has healed."""
    wrong = await _judge(scenario)
    await asyncio.sleep(0.1)  # until whoever waits for a task that has failed has seen it
    for process in scenario.processes:
        process.look()
        wrong += process.escaped
    return wrong


async def _judge(scenario: Scenario) -> list[str]:
    wrong = [text for request in scenario.requests for text in _stream(scenario, request)]
    if any(not request.over for request in scenario.requests):
        return wrong
    try:
        async with asyncio.timeout(QUIET_SECONDS):
            while _unrest(scenario):  # noqa: ASYNC110  there is no event for all of it
                await asyncio.sleep(0.25)
    except TimeoutError:
        return wrong + [f"not after {QUIET_SECONDS:g} s: {what}" for what in _unrest(scenario)]
    for router in scenario.of("router"):
        wrong += await _probe(scenario, router)
    for router in scenario.of("router"):
        begun, counted = router.server.num_calls.get(GENERATE, 0), router.metrics()["lorrery_router_requests_total"]
        if begun != counted:
            wrong.append(f"{router.name} has served {begun} streams and counted {counted:g}")
    for scheduler in scenario.of("scheduler"):
        wrong += _counts(scheduler)
    return wrong


def _counts(scheduler: Process) -> list[str]:
    """Each request that has come in has ended once, and no worker was given up for what it said."""
    metrics, come = scheduler.metrics(), scheduler.service._cluster.requests._num_handles
    ended = metrics.get("lorrery_scheduler_requests_total", 0.0) + metrics["lorrery_scheduler_orphaned_requests_total"]
    ended += scheduler.service._cluster.metrics._cancels.labels("moved").value  # they end elsewhere
    wrong = [] if ended == come else [f"{scheduler.name} has taken in {come} requests and counted {ended:g} ends"]
    for reason in (Loss.PROTOCOL, Loss.ERROR):
        name = "lorrery_scheduler_workers_given_up_total"
        if num := scheduler.registry.get_sample_value(name, {"reason": reason}):
            wrong.append(f"{scheduler.name} has given up {num:g} workers: {reason}")
    return wrong


GENERATE = "/lorrery.v1.RouterService/Generate"


def _stream(scenario: Scenario, request: Request) -> list[str]:
    """A stream has its reference's tokens, once, in order; one that failed has some of the first, and may fail so."""
    expected, text, reason = request.expected.token_ids, request.expected.text, request.expected.reason
    got = request.token_ids
    what = f"{request.ask} {request.expected.stop!r}: "
    if got != expected[: len(got)] or not text.startswith(request.text):
        return [f"{what}tokens {got}, {request.text!r}, are not those of the reference, {expected}, {text!r}"]
    if request.finish is not None:
        usage = request.finish.usage
        if got != expected or request.text != text or request.finish.reason != reason:
            return [f"{what}finished with {len(got)} of {len(expected)} tokens, {request.finish}"]
        if (usage.prompt_tokens, usage.completion_tokens) != (request.ask.prompt_tokens, len(expected)):
            return [f"{what}usage is {usage}"]
        return []
    if not request.over or request.cancelled or request.cut:
        return []
    if request.error is None:
        return [f"{what}ended without a finish and without an error"]
    may = _may_fail(scenario, request)
    code, why = request.error.code(), _reason(request.error)
    return [] if why in may or code.name in may else [f"{what}failed with {code.name} {why}: {request.error.details()}"]


def _may_fail(scenario: Scenario, request: Request) -> set[str]:
    may: set[str] = set()
    if request.has_deadline:
        may.add("DEADLINE_EXCEEDED")
    if request.slow_seconds:
        may.add("SLOW_READER")
    if request.ask.adapter_id in LATE:
        may.add("UNKNOWN_ADAPTER")
    if request.key == "few" and not request.ask.adapter_id.startswith("a-"):
        may.add("PERMISSION_DENIED")
    if request.key in ("few", "metered"):
        may.add("QUOTA_EXCEEDED")
    if "adapters.load_failure_ratio=0.2" in scenario.overrides:
        may.add("ADAPTER_LOAD")
    if not scenario.calm:
        may |= {"UNAVAILABLE", "NO_WORKER", "NO_SCHEDULER", "DRAINING", "WORKERS_LOST", "CANCELLED"}
    return may


def _reason(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    if status is None or not status.details or not status.details[0].Unpack(info):
        return ""
    return info.reason


def _unrest(scenario: Scenario) -> list[str]:
    """Return who is not connected yet, what is held though no stream is open, and who knows other adapters."""
    found: list[str] = []
    routers, schedulers, workers = scenario.of("router"), scenario.of("scheduler"), scenario.of("worker")
    for process in scenario.processes:
        if process.is_ending:
            found.append(f"{process.name} drains")
        elif not process.runs:
            process.begin()
            found.append(f"{process.name} has ended")
    if found:
        return found
    for process in scenario.processes:
        metrics = process.metrics()
        for gauge in HELD[process.kind]:
            if "waiting" in gauge and "strict" in scenario.way:
                continue  # S-LoRA's own queue keeps who was cancelled until the next batch is formed
            if value := metrics.get(gauge):
                found.append(f"{process.name} {gauge} is {value:g}")
    attached = [name for scheduler in schedulers for name in scheduler.service._cluster.workers]
    found += [f"{worker.name} is not attached" for worker in workers if worker.name not in attached]
    for router in routers:
        for shard in router.service._handler._placement.shards:
            if not shard.accepts:
                found.append(f"{router.name} has no stream to {shard.address}")
            elif left := _left_of(shard._session):
                found.append(f"{router.name} still has of {shard.address}: {left}")
    for scheduler in schedulers:
        cluster = scheduler.service._cluster
        if len(cluster.routers) != len(routers):
            found.append(f"{scheduler.name} has streams of {len(cluster.routers)} routers")
        for link in cluster.routers:
            if link.owned:
                found.append(f"{scheduler.name} owns {link.owned} for a router")
        for use in cluster.core._quotas._by_key.values():
            if use.open or use.held or use.charged:
                found.append(f"{scheduler.name} counts for {use.quota.key}: {use.open} {use.held} {use.charged}")
        for name, member in cluster.core.members.items():
            if member.sequences or member.moving or member.withdrawn:
                found.append(f"{scheduler.name}: {name} has {member.sequences} {member.moving} {member.withdrawn}")
    logs = {router.name: router.service._handler._placement.log.changes for router in routers}
    logs |= {scheduler.name: scheduler.service._cluster.adapters.log.changes for scheduler in schedulers}
    if len({tuple(changes) for changes in logs.values()}) > 1:
        found.append(f"adapters are known differently: {logs}")
    return found


class Cancelled:
    """A request that has been cancelled goes to no worker any more, wherever it was and whatever was lost.

    Args:
        patch: puts this before what a scheduler does.
        scenario: its errors get what is wrong.
    """

    def __init__(self, patch: pytest.MonkeyPatch, scenario: Scenario) -> None:
        self._scenario = scenario
        self._requests: dict[int, LiveRequest] = {}
        before(patch, Dispatcher, "withdrawn", self._withdrawn)
        before(patch, Dispatcher, "placed", self._placed)

    def _withdrawn(self, worker: Dispatcher, event: Withdrawn, _at_ps: int) -> None:
        live = worker._cluster.requests.lives[event.sequence.handle]
        self._requests[id(live)] = live

    def _placed(self, worker: Dispatcher, event: Placed, _at_ps: int) -> None:
        live = worker._cluster.requests.lives[event.sequence.handle]
        if id(live) in self._requests and not self._scenario.trouble.order_is_lost:
            self._scenario.errors.append(f"{live.request_id} was cancelled and goes to {worker.worker_id}")


def _left_of(session: Session) -> list[object]:
    """Return what a stream to a scheduler holds though none of its requests is open."""
    tables: list[Collection[object]] = [session._submits, session._cancels, session.fanout._withdrawn]
    return [table for table in tables if table]


async def _probe(scenario: Scenario, router: Process) -> list[str]:
    """A request comes through, once all has healed."""
    request = scenario.ask(Ask(7, prompt_tokens=5, max_new_tokens=3), router)
    try:
        async with asyncio.timeout(10.0):
            await scenario.all_over()
    except TimeoutError:
        return [f"a request through {router.name} does not end, though all has healed"]
    return (
        []
        if request.finish is not None and request.token_ids == request.expected.token_ids
        else [f"probe: {request.error!r}"]
    )
