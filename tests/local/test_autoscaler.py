"""The autoscaler of a local cluster, beside processes that end by themselves."""

import asyncio
from types import SimpleNamespace
from typing import Any

from lorrery.local.autoscaler import LocalAutoscaler
from lorrery.settings import changed

NOBODY = "127.0.0.1:1"
SETTINGS = changed({"autoscaler": {"enabled": True, "min_replicas": 2, "scale_down_stabilization_seconds": 0.0}})


async def test_a_worker_that_has_ended_is_not_ready_and_goes_first():
    drained: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    processes = {
        name: SimpleNamespace(metrics=NOBODY, exit_code=1 if name == "worker-1" else None)
        for name in ("scheduler", "worker-0", "worker-1", "worker-2")
    }
    names = ("worker-0", "worker-1", "worker-2")
    cluster: Any = SimpleNamespace(
        settings=SETTINGS, worker_processes=dict.fromkeys(names), processes=processes, drain=drained.set_result
    )
    said: list[str] = []
    running = asyncio.create_task(LocalAutoscaler(cluster, 1.0, said.append).run())
    await asyncio.wait([running, drained], return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert drained.result() == "worker-1"
    assert said[-1] == "autoscaler: worker-1 drains; 2 workers"
