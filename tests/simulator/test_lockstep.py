"""A client in lock step with a simulation over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

import lorrery
from lorrery.service.local.processes import start_python
from lorrery.service.settings.sections import TlsSettings
from lorrery.simulator.lockstep import serve
from lorrery.simulator.result import SimulationResult
from lorrery.v1 import simulation_pb2, simulation_pb2_grpc
from tests.cluster.client import error_info
from tests.simulator.test_autoscaling import CLUSTER, bursts


@asynccontextmanager
async def served() -> AsyncIterator[
    tuple["simulation_pb2_grpc.SimulationServiceAsyncStub", "asyncio.Task[SimulationResult | None]"]
]:
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    cluster = lorrery.VirtualCluster(CLUSTER, bursts(), workers=1)
    server = asyncio.create_task(serve(cluster, "127.0.0.1:0", TlsSettings(), address.set_result))
    async with grpc.aio.insecure_channel(await address) as channel:
        try:
            yield simulation_pb2_grpc.SimulationServiceStub(channel), server
        finally:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)


def scaled(seen: simulation_pb2.Observation | lorrery.Observation) -> int:
    return 1 + int(seen.metrics["num_requests_waiting"] // 4)


async def test_a_caller_over_a_socket_gets_what_one_in_python_gets():
    own = lorrery.VirtualCluster(CLUSTER, bursts(), workers=1)
    async with served() as (stub, server):
        seen = (await stub.Observe(simulation_pb2.ObserveRequest())).observation
        while not seen.done:
            here = own.observe()
            assert dict(seen.metrics) == dict(here.metrics)
            assert (seen.at_seconds, seen.num_ready, seen.num_starting) == (
                here.at_seconds,
                here.num_ready,
                here.num_starting,
            )
            await stub.Scale(simulation_pb2.ScaleRequest(num_replicas=scaled(seen)))
            own.scale(scaled(here))
            seen = (await stub.Advance(simulation_pb2.AdvanceRequest(seconds=5))).observation
            own.advance(5)
        found = await stub.Finish(simulation_pb2.FinishRequest())
        ours, theirs = own.result(), await server
    assert theirs is not None
    assert theirs.columns.end_seconds.tolist() == ours.columns.end_seconds.tolist()
    assert ours.scaling is not None
    assert found.gpu_hours == ours.scaling.summary.gpu_hours
    assert (found.num_requests, found.num_completed) == (288, 288)
    assert found.num_scalings > 2


async def test_errors_are_typed_and_the_text_is_prometheus():
    async with served() as (stub, _):
        for call in (
            stub.Advance(simulation_pb2.AdvanceRequest(seconds=-1)),
            stub.Scale(simulation_pb2.ScaleRequest(num_replicas=20_000)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as wrong:
                await call
            assert wrong.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert error_info(wrong.value)[0] == "INVALID_VALUE"
        await stub.Advance(simulation_pb2.AdvanceRequest(seconds=10))
        answer = await stub.Observe(simulation_pb2.ObserveRequest(with_prometheus=True))
        names = {family.name for family in text_string_to_metric_families(answer.prometheus)}
        assert {"vllm:num_requests_waiting", "vllm:time_to_first_token_seconds"} <= names


async def test_after_the_end_every_call_says_so():
    cluster = lorrery.VirtualCluster(CLUSTER, bursts(), workers=1)
    cluster.result()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(cluster, "127.0.0.1:0", TlsSettings(), address.set_result))
    async with grpc.aio.insecure_channel(await address) as channel:
        stub = simulation_pb2_grpc.SimulationServiceStub(channel)
        for call in (stub.Observe(simulation_pb2.ObserveRequest()), stub.Finish(simulation_pb2.FinishRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as over:
                await call
            assert over.value.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert error_info(over.value)[0] == "RUN_IS_OVER"
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)


@pytest.mark.parametrize(("seconds", "num_completed"), [(600, 20), (1, 0)])
async def test_the_command_serves_a_run_and_reports_it_however_early_its_caller_finishes(
    tmp_path: Path, seconds: float, num_completed: int
):
    arguments = ["--serve", "127.0.0.1:0", "-n", "20", "--rate", "10", "--workers", "1", "--out", str(tmp_path)]
    pipe = asyncio.subprocess.PIPE
    process = await start_python(["-m", "lorrery.cli", "simulate", *arguments], stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    async with grpc.aio.insecure_channel(line.split()[-1]) as channel:
        stub = simulation_pb2_grpc.SimulationServiceStub(channel)
        await stub.Advance(simulation_pb2.AdvanceRequest(seconds=seconds))
        found = await stub.Finish(simulation_pb2.FinishRequest())
    output, error = await process.communicate()
    assert (process.returncode, found.num_completed) == (0, num_completed), error
    assert f"{num_completed} completed" in output.decode()
    assert "GPU hours" in output.decode()
    assert f"{tmp_path / 'report.html'}" in output.decode()
    assert f"{num_completed} completed" in (tmp_path / "report.html").read_text()
