"""The autoscaler of a local cluster, beside processes that end by themselves."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lorrery.service.errors import LorreryError
from lorrery.service.local import autoscaler
from lorrery.service.local.autoscaler import ClusterScraper, LocalAutoscaler
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.settings.cluster import changed

NOBODY = "127.0.0.1:1"
SETTINGS = changed({"autoscaler": {"enabled": True, "min_replicas": 2, "scale_down_stabilization_seconds": 0.0}})


async def test_a_worker_that_has_ended_is_not_ready_and_goes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(autoscaler, "_get", lambda _address: {"vllm:num_requests_waiting": 0.0})
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
    running = asyncio.create_task(LocalAutoscaler(cluster, SETTINGS, names, None, 1.0, said.append).run())
    await asyncio.wait([running, drained], return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert drained.result() == "worker-1"
    assert said[-1] == "autoscaler: worker-1 drains; 2 workers"


async def test_it_scrapes_and_decides_in_device_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(autoscaler, "_get", lambda _address: {"vllm:num_requests_waiting": 0.0})
    settings = changed(SETTINGS, {"time_scale": 0.01, "autoscaler.scrape_interval_seconds": 10.0})
    names = ("worker-0", "worker-1")  # as many as it keeps
    processes = {name: SimpleNamespace(metrics=NOBODY, exit_code=None) for name in ("scheduler", *names)}
    cluster: Any = SimpleNamespace(processes=processes)
    scaler = LocalAutoscaler(cluster, settings, names, None, 1.0, lambda _line: None)
    times: list[float] = []
    enough = asyncio.Event()
    sample = ClusterScraper.sample

    async def noted(scraper: ClusterScraper, at_seconds: float, *args: Any, **given: Any) -> Any:
        times.append(at_seconds)
        if len(times) == 4:
            enough.set()
        return await sample(scraper, at_seconds, *args, **given)

    monkeypatch.setattr(ClusterScraper, "sample", noted)
    running = asyncio.create_task(scaler.run())
    await asyncio.wait_for(enough.wait(), 10)  # at 5, 15, 25 and 35 device seconds: a third of a second here
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert all(at_seconds >= due for at_seconds, due in zip(times, (5, 15, 25, 35), strict=False))


class Cluster:
    """One whose first start of `worker-1` fails, until it is started again."""

    settings = SETTINGS

    def __init__(self) -> None:
        self.worker_processes = {"worker-0": ("worker-0",)}
        self.processes = {name: self.process() for name in ("scheduler", "worker-0")}
        self.started: list[str] = []
        self.failed, self.served = asyncio.Event(), asyncio.Event()

    def process(self) -> Any:
        return SimpleNamespace(metrics=NOBODY, exit_code=None, succeeded=asyncio.Event(), kill=self.kill)

    def kill(self) -> None:
        self.processes[self.started[-1]].exit_code = -9
        self.failed.set()

    async def start_worker(self, start_up_seconds: float, group: int | None, name: str | None) -> str:
        del start_up_seconds, group
        self.started.append(name or f"worker-{len(self.started) + 1}")
        self.processes[self.started[-1]] = self.process()
        return self.started[-1]

    async def ended(self, name: str) -> None:
        self.processes[name].exit_code = -9

    async def listening(self, name: str) -> None:
        if not self.failed.is_set():
            raise LorreryError(f"{name} ended with exit code 1")

    async def serving(self, name: str, timeout_seconds: float) -> None:
        del name, timeout_seconds
        self.served.set()


async def test_a_start_that_fails_counts_until_its_process_runs_again():
    cluster, said = Cluster(), []
    rule = {"min_replicas": 2, "max_replicas": 2, "sync_period_seconds": 0.1}
    kind = changed(SETTINGS, {"autoscaler": {**rule, "enabled": True}})
    scaling = LocalAutoscaler(cluster, kind, ["worker-0"], None, 1.0, said.append)  # type: ignore[arg-type]
    running = asyncio.create_task(scaling.run())
    await cluster.failed.wait()
    assert scaling.has("worker-1")
    died, cluster.processes["worker-1"] = cluster.processes["worker-1"], cluster.process()
    died.succeeded.set()  # as the supervisor starts it again
    await cluster.served.wait()
    await scaling.replace("worker-0")
    assert scaling.has("worker-0")
    assert cluster.started == ["worker-1", "worker-0"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [line.removeprefix("autoscaler: ") for line in said[2:4]] == [
        "worker-1 did not start: worker-1 ended with exit code 1",
        "worker-1 serves; 2 workers",
    ]


class Idle(LocalCluster):
    """One whose processes are never started."""

    async def _start(self, name: str, service: str, overrides: list[str], further: Sequence[str] = ()) -> None:
        del service, overrides, further
        self.processes[name].exit_code = None


async def test_a_replacement_has_the_name_of_what_it_replaces_and_any_other_start_the_lowest_that_is_free():
    cluster = Idle(None, (), 3)
    ended = {"scheduler": None, "worker-0": None, "worker-1": 0, "worker-2": -9}
    processes: Any = {
        name: SimpleNamespace(grpc="h:1", exit_code=code, exit_expected=True) for name, code in ended.items()
    }
    cluster.processes = processes
    assert await cluster.start_worker(1.0, None, "worker-2") == "worker-2"
    assert await cluster.start_worker(1.0) == "worker-1"
