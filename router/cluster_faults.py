"""An operator's faults of the whole cluster: those of requests hold at this router, the others at every scheduler."""

import asyncio
from collections.abc import Sequence

from lorrery.chassis.fault_calls import read_rules
from lorrery.chassis.faults import REQUEST_KINDS
from lorrery.router.adapters import CALL_SECONDS, connected
from lorrery.router.faults import Injector
from lorrery.router.placement import Placement
from lorrery.v1 import router_pb2, scheduler_pb2


async def set_faults(placement: Placement, injector: Injector, texts: Sequence[str]) -> None:
    """Let these happen, in place of those of the call before.

    Raises:
        InvalidRequest: one is none.
        Unavailable: there are some for schedulers, and none is connected.
        grpc.aio.AioRpcError: a scheduler did not take them.
    """
    faults = read_rules(texts, "rules")
    request = scheduler_pb2.SetClusterFaultsRequest(
        rules=[fault.text for fault in faults if fault.kind not in REQUEST_KINDS]
    )
    shards = connected(placement) if request.rules else [shard for shard in placement.shards if shard.connected]
    await asyncio.gather(
        *(shard.stub.SetClusterFaults(request, timeout=CALL_SECONDS, metadata=shard.credentials) for shard in shards)
    )
    injector.replace(fault for fault in faults if fault.kind in REQUEST_KINDS)


async def list_faults(placement: Placement, injector: Injector) -> router_pb2.ListFaultsResponse:
    """Return what holds, and how often it has happened; the schedulers' are added up.

    Raises:
        grpc.aio.AioRpcError: a scheduler did not answer.
    """
    request = scheduler_pb2.ListClusterFaultsRequest()
    answers = await asyncio.gather(
        *(
            shard.stub.ListClusterFaults(request, timeout=CALL_SECONDS, metadata=shard.credentials)
            for shard in placement.shards
            if shard.connected
        )
    )
    num_met: dict[str, int] = {}
    for answer in answers:
        for fault in answer.faults:
            num_met[fault.rule] = num_met.get(fault.rule, 0) + fault.num_met
    rules = [(fault.text, num) for fault, num in injector.rules]
    return router_pb2.ListFaultsResponse(
        faults=[router_pb2.FaultRule(rule=rule, num_requests=num) for rule, num in [*rules, *num_met.items()]]
    )
