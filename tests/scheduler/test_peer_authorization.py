"""Who may call a scheduler, over real gRPC: the shared token."""

from pathlib import Path

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from lorrery.service.errors import SettingsError
from lorrery.service.network.credentials import Metadata, bearer
from lorrery.service.settings.cluster import load
from lorrery.v1 import scheduler_pb2 as pb
from tests.cluster.harness import wait_until
from tests.scheduler.harness import OVERRIDES, Harness

TOKEN = "a-token-of-the-cluster"
HELLO = {
    "Route": pb.RouteRequest(hello=pb.RouterHello(router_id="r")),
    "Attach": pb.AttachRequest(hello=pb.WorkerHello(worker_id="w", model="Llama-2-7B", max_total_token_num=6000)),
}


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.token"
    path.write_text(f"{TOKEN}\n")
    return path


def write(path: Path, text: str) -> None:
    path.write_text(text)


async def outcome(harness: Harness, method: str, metadata: Metadata = (), *, silent: bool = False) -> str:
    """Call a method; return how it ends, or OK.

    Where a call is refused, its caller should be `silent`, without a hello: grpc.aio turns the status of a call that
    has ended into INTERNAL if a write fails before it has read the status.
    """
    if method in HELLO:
        call = getattr(harness.stub, method)(metadata=metadata, timeout=60)
        harness.calls.append(call)
        try:
            if not silent:
                await call.write(HELLO[method])
            answer = await call.read()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            return (await call.code()).name
        call.cancel()
        return (await call.code()).name if answer is grpc.aio.EOF else "OK"
    try:
        description = pb.DESCRIPTOR.services_by_name["SchedulerService"].methods_by_name[method]
        call = getattr(harness.stub, method)(getattr(pb, description.input_type.name)(), metadata=metadata, timeout=60)
        await (call.read() if description.server_streaming else call)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["SchedulerService"].methods]


@pytest.mark.parametrize("method", METHODS)
async def test_every_call_needs_the_token(token: Path, method: str):
    async with Harness(load(None, [*OVERRIDES, f"cluster_token={token}"])) as harness:
        for given in ((), bearer("another-token-than-this")):
            assert await outcome(harness, method, given, silent=True) == "UNAUTHENTICATED"
        assert await outcome(harness, method, bearer(TOKEN)) != "UNAUTHENTICATED"


async def test_refused_calls_are_logged_with_the_reason(token: Path):
    async with Harness(load(None, [*OVERRIDES, f"cluster_token={token}"])) as harness:
        with capture_logs() as events:
            await outcome(harness, "Attach", silent=True)
            await outcome(harness, "GetStatus", bearer("another-token-than-this"))
            await outcome(harness, "GetStatus", bearer(TOKEN))
    refused = [event for event in events if event["event"] == "call_refused"]
    first, second = refused
    assert first["called_as"] == "worker"
    assert first["reason"].startswith("the cluster's token is needed here; give this service the scheduler's file")
    assert second["called_as"] == "router or operator"
    assert second["reason"].startswith("the token sent is not this cluster's; give this service the scheduler's file")
    assert {event["peer"].partition(":")[0] for event in refused} == {"ipv4"}
    assert TOKEN not in str(events)
    assert "another-token" not in str(events)


async def test_a_token_can_be_changed_while_services_run(token: Path):
    async with Harness(load(None, [*OVERRIDES, f"cluster_token={token}"])) as harness:
        new = "the-next-token-of-it"

        async def accepted(secret: str) -> bool:
            return await outcome(harness, "GetStatus", bearer(secret)) == "OK"

        write(token, f"{TOKEN}\n{new}\n")
        await wait_until(lambda: accepted(new), what="both are accepted")
        assert await accepted(TOKEN)
        write(token, "short\n")  # no token: what was in force stays
        write(token, f"{new}\n")

        async def gone() -> bool:
            return not await accepted(TOKEN)

        await wait_until(gone, what="the old one is refused")
        assert await accepted(new)


@pytest.mark.parametrize("text", ["", "short\n", "täken-of-the-cluster\n", None])
def test_a_file_without_a_token_is_an_error(tmp_path: Path, text: str | None):
    path = tmp_path / "cluster.token"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match="cluster_token"):
        Harness(load(None, [f"cluster_token={path}"]))
