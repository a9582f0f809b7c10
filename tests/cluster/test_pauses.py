"""A service that stands still for longer than the time-outs costs no stream; `tests.cluster.pauses` measures it."""

import pytest

from tests.cluster import pauses
from tests.cluster.harness import StartCluster

pytestmark = pytest.mark.cluster

# Three fifths of the shipped time-outs, and of 8 s: a worker that waits for a core for less is not lost.
SETTINGS = (
    *pauses.SETTINGS,
    "scheduler.worker_timeout_seconds=3",
    "worker.heartbeat_seconds=0.6",
    "scheduler.worker_wait_seconds=18",
    "router.resume_timeout_seconds=36",
)
STOP_SECONDS = 4.8


@pytest.mark.timeout(300)
async def test_a_stopped_service_costs_no_stream_and_a_stopped_scheduler_no_worker(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(*SETTINGS, num_workers=2)
    for seed, (name, lost) in enumerate({"scheduler": 0, "router": 0, "worker-0": 1}.items()):
        did = await pauses.pause(cluster, name, STOP_SECONDS, seed)
        assert (did.service, did.workers_lost, did.resumed) == (name, lost, 0)
        assert (did.requeued > 0) == (lost > 0)
