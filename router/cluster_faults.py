"""Cluster-wide fault rules of an operator: request faults apply at this router, the others at every scheduler."""

import asyncio
from collections.abc import Sequence

from lorrery.router.adapters import CALL_SECONDS, connected
from lorrery.router.faults import Injector
from lorrery.router.placement import Placement
from lorrery.service.faults.kinds import REQUEST_KINDS, check_number, further, read_rules
from lorrery.service.network.channel import failing_when_closed
from lorrery.v1 import router_pb2, scheduler_pb2


async def set_faults(placement: Placement, injector: Injector, texts: Sequence[str], *, add: bool) -> None:
    """Set fault rules, replacing or adding to those of previous calls.

    Raises:
        InvalidRequest: a rule is invalid, or there are too many.
        Unavailable: there are rules for schedulers, and none is connected.
        grpc.aio.AioRpcError: a scheduler did not accept them.
    """
    faults = read_rules(texts, "rules")
    own = [fault for fault in faults if fault.kind in REQUEST_KINDS]
    if add:
        own = further(own, injector.operators)
        check_number(len(injector.operators), len(own))
    request = scheduler_pb2.SetClusterFaultsRequest(
        rules=[fault.text for fault in faults if fault.kind not in REQUEST_KINDS], add=add
    )
    shards = connected(placement) if request.rules else [shard for shard in placement.shards if shard.connected]
    with failing_when_closed():
        await asyncio.gather(
            *(
                shard.stub.SetClusterFaults(request, timeout=CALL_SECONDS, metadata=shard.credentials)
                for shard in shards
            )
        )
    injector.take(own, add=add)


async def list_faults(placement: Placement, injector: Injector) -> router_pb2.ListFaultsResponse:
    """Return the rules in force and how often each has applied, summed over the schedulers.

    Raises:
        grpc.aio.AioRpcError: a scheduler did not answer.
    """
    request = scheduler_pb2.ListClusterFaultsRequest()
    with failing_when_closed():
        answers = await asyncio.gather(
            *(
                shard.stub.ListClusterFaults(request, timeout=CALL_SECONDS, metadata=shard.credentials)
                for shard in placement.shards
                if shard.connected
            )
        )
    own = [router_pb2.FaultRule(rule=fault.text, num_requests=num_met) for fault, num_met in injector.rules]
    others: dict[str, router_pb2.FaultRule] = {}
    for answer in answers:
        for fault in answer.faults:
            rule = others.setdefault(fault.rule, router_pb2.FaultRule(rule=fault.rule, waits_for_worker=True))
            rule.num_requests += fault.num_met
            rule.waits_for_worker = rule.waits_for_worker and fault.waits_for_worker
    return router_pb2.ListFaultsResponse(faults=[*own, *others.values()])
