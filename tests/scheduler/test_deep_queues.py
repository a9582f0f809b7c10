"""Many requests that wait are moved and cancelled in slices, and everything else goes on in between."""

import asyncio
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from lorrery.scheduler.cluster import Cluster
from lorrery.scheduler.core.placing import SLICE
from lorrery.scheduler.messages import Submit, WorkerHello
from lorrery.scheduler.routers import RouterLink
from lorrery.service.settings.cluster import load
from lorrery.v1 import scheduler_pb2 as pb
from lorrery.vocabulary import u32
from lorrery.vocabulary.endings import CancelCause

MANY = 10 * SLICE


class Loaded:
    """A scheduler whose worker w0 has many requests that wait, w1 a later one; every slice is as short as can be."""

    def __init__(self) -> None:
        self.cluster = Cluster(load(None, ["model='Llama-2-7B'", "worker.gpu='A10G'"]), CollectorRegistry())
        self.cluster.slices.seconds = 0
        self.router = RouterLink("router", self.cluster.clock, 10**9)
        self.first = self.cluster.attach(hello("w0"))
        for handle in range(MANY):
            self.submit(handle)
        self.second = self.cluster.attach(hello("w1"))
        self.submit(MANY)

    def submit(self, handle: int) -> None:
        prompt = u32.pack(range(5))
        message = Submit(handle, f"r{handle}", "", "t", prompt, 5, pb.Sampling(seed=handle, max_new_tokens=5))
        self.cluster.requests.submit(message, self.router)

    @property
    def num_placed(self) -> int:
        return sum(len(member.sequences) for member in self.cluster.core.members.values())


def hello(name: str) -> WorkerHello:
    return WorkerHello(name, "A10G", "Llama-2-7B", 1, 60_000, "roofline", needs_prompts=False)


@pytest.mark.parametrize("drains", [False, True])
async def test_the_loop_goes_on_while_the_requests_of_a_lost_worker_are_placed_again(drains: bool) -> None:
    loaded = Loaded()
    cluster = loaded.cluster
    act: Callable[[], None] = (
        (lambda: cluster.drain_worker(loaded.first)) if drains else lambda: cluster.detach(loaded.first)
    )
    act()
    rounds = 0
    while cluster.core.is_placing:
        before = loaded.num_placed
        await asyncio.sleep(0)
        assert loaded.num_placed - before <= SLICE
        rounds += 1
        if rounds == 2:
            loaded.submit(MANY + 1)
            assert loaded.num_placed > before  # one that comes meanwhile does not wait for the rest
            cluster.requests.cancel(loaded.router, MANY - 1, CancelCause.CLIENT_LEFT)
    assert rounds >= MANY / SLICE - 3
    assert cluster.core.num_unplaced == 0
    for _ in range(3):
        await asyncio.sleep(0)  # the cancelled one is forgotten after the rest is placed
    assert len(cluster.requests.lives) == cluster.core.num_open == MANY + 1


async def test_the_loop_goes_on_while_the_requests_of_a_router_that_is_gone_are_cancelled() -> None:
    loaded = Loaded()
    cluster = loaded.cluster
    for worker in (loaded.first, loaded.second):
        cluster.detach(worker)
    num_open = len(cluster.requests.lives)
    cluster.disconnect(loaded.router)
    rounds = 0
    while cluster.requests.lives:
        assert len(cluster.requests.lives) >= num_open - 1
        num_open = len(cluster.requests.lives)
        await asyncio.sleep(0)
        rounds += 1
    assert rounds >= MANY
    assert cluster.core.num_open == 0
    assert cluster.requests.empty.is_set()
