"""What routers say of keys and adapters, as the scheduler reads it, and what workers hear of adapters' versions."""

from fractions import Fraction

import numpy as np
import pytest

from lorrery.router import wire as router_wire
from lorrery.router.access import ApiKey
from lorrery.scheduler import wire_routers, wire_workers
from lorrery.scheduler.core.plan import Plan
from lorrery.scheduler.core.sequence import Adapter
from lorrery.scheduler.messages import ProtocolError
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.v1 import types_pb2
from lorrery.worker import wire as worker_wire
from lorrery.worker.device.answers import Answers
from lorrery.worker.device.output import LlmMockLength

PROMPT = np.arange(4, dtype="<u4").tobytes()


def submit(**more: object) -> pb.Submit:
    return pb.Submit(handle=1, prompt_token_ids_u32=PROMPT, sampling=pb.Sampling(max_new_tokens=4), **more)


@pytest.mark.parametrize(
    ("weight", "read"), [(1.0, None), (2.5, Fraction(5, 2)), (0.1, Fraction(1, 10)), (1e6, Fraction(1_000_000))]
)
def test_a_keys_weight_arrives_as_it_was_written(weight: float, read: Fraction | None) -> None:
    key = ApiKey(name="k", sha256="0" * 64, tenant="acme", weight=weight, max_running=3)
    quota = wire_routers.read_submit(submit(quota=router_wire.quota(key))).quota
    assert quota is not None
    assert (quota.key, quota.max_running, quota.weight) == ("k", 3, read)


@pytest.mark.parametrize("weight", ["0", "0.0", "-1", "NaN", "inf", "1e999999999", "1/0", "1 ", "x", "1" * 500])
def test_a_weight_that_is_none_is_refused(weight: str) -> None:
    with pytest.raises(ProtocolError, match=r"weight is .*; it must be a decimal number or a fraction above 0"):
        wire_routers.read_submit(submit(quota=pb.Quota(key="k", weight=weight)))


def test_an_adapters_version_arrives_and_0_is_that_of_the_settings() -> None:
    read = wire_routers.read_submit(submit(adapter=types_pb2.Adapter(adapter_id="a", rank=8, version=2**63)))
    assert (read.adapter_rank, read.adapter_version) == (8, 2**63)
    read = wire_routers.read_submit(submit())
    assert (read.adapter_rank, read.adapter_version) == (0, 0)


def test_a_priority_arrives_and_is_0_if_unset() -> None:
    assert wire_routers.read_submit(submit(priority=-(2**31))).priority == -(2**31)
    assert wire_routers.read_submit(submit()).priority == 0


def test_a_worker_tells_versions_of_an_adapter_apart() -> None:
    plan = Plan(5, 1)
    plan.adapter_loads = Adapter("a", 8), Adapter("a", 16, version=7)
    message = wire_workers.write_plan(plan, 1, 5, {}.__getitem__, False).plan
    assert [(one.adapter_id, one.rank, one.version) for one in message.adapter_loads] == [("a", 8, 0), ("a", 16, 7)]
    read = worker_wire.read_plan(message, Answers("m", LlmMockLength()), 5)
    assert read.adapter_loads == ("a", "a@7")
