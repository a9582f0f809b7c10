"""A cluster that others can reach: certificates with roles, the shared token, API keys; in real processes."""

import asyncio
import socket
import ssl
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import pytest
from typer.testing import CliRunner

from lorrery.cli.certs import app as certs_app
from lorrery.cli.keys import app as keys_app
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.network.credentials import bearer
from lorrery.service.network.server import LIVENESS
from lorrery.v1 import router_pb2, router_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from tests.cluster.client import TIMEOUT_SECONDS, Ask, Stream
from tests.cluster.harness import metric, running_cluster, wait_until, write_settings
from tests.deploy.chart import PROGRAM, pods
from tests.deploy.probes import healthcheck

pytestmark = pytest.mark.cluster


def make_certificates(folder: Path) -> Path:
    result = CliRunner().invoke(certs_app, [str(folder)])
    assert result.exit_code == 0, result.output
    return folder


def make_token(path: Path) -> Path:
    path.write_text("a-token-for-this-test\n")
    return path


def make_key(path: Path, *arguments: str) -> str:
    """Append an entry to a file of keys; return the key."""
    result = CliRunner().invoke(keys_app, ["new", *arguments])
    with path.open("a") as file:
        file.write(result.stdout)
    return result.stderr.split()[-1]


def tls(certs: Path) -> list[str]:
    """The settings with which every service of a machine has one certificate."""
    return [
        f"{side}_tls.{name}={certs / file}"
        for side in ("server", "client")
        for name, file in (("cert", "cluster.pem"), ("key", "cluster.key"), ("ca", "ca.pem"))
    ]


def channel(address: str, certs: Path, name: str) -> grpc.aio.Channel:
    """A channel of the holder of a certificate."""
    ca, key, cert = ((certs / file).read_bytes() for file in ("ca.pem", f"{name}.key", f"{name}.pem"))
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options)


def probed(component: str) -> set[str]:
    """Return the names under which the Helm chart's probes ask for a component's health."""
    if not PROGRAM.exists():  # helm has no wheel for this platform
        return {LIVENESS}
    probes = [probe for pod in pods("minimal") if pod.component == component for probe in pod.probes.values()]
    return {probe["grpc"].get("service", "") for probe in probes}


async def healthy(*arguments: str) -> bool:
    """Whether the check finds a service well; it gives one that waits for a core less time than a test does."""
    return await healthcheck(*arguments) == (0, "")


async def served(cluster: LocalCluster, certs: Path, key: str) -> None:
    """Assert that the cluster answers a client with a certificate and a key, and what it must."""
    ask = Ask(seed=7, adapter_id="lora-0")
    async with channel(cluster.router_address, certs, "client") as dialled:
        stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(dialled)
        stream = await Stream(ask, stub.Generate(ask.message(), metadata=bearer(key), timeout=TIMEOUT_SECONDS))
        stream.check(cluster.settings)


async def attach_outcome(cluster: LocalCluster, certs: Path, name: str, metadata=(), *, hello: bool = False) -> str:
    """Attach as the holder of a certificate; return what it ends with, or OK for a welcome.

    Who expects to be turned away says no hello: a write into a call that ends makes gRPC's client forget its status.
    """
    async with channel(cluster.scheduler_address, certs, name) as dialled:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(dialled)
        call = stub.Attach(metadata=metadata, timeout=TIMEOUT_SECONDS)
        said = scheduler_pb2.WorkerHello(worker_id="intruder", model="Llama-3-8B", max_total_token_num=10**6)
        try:
            if hello:
                await call.write(scheduler_pb2.AttachRequest(hello=said))
            answer = await call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return (await call.code()).name
        call.cancel()
        return "OK" if answer is not grpc.aio.EOF else (await call.code()).name


async def test_each_role_has_its_own_calls_and_no_other(tmp_path: Path):
    certs = make_certificates(tmp_path / "certs")
    token, keys = make_token(tmp_path / "token"), tmp_path / "keys.toml"
    key = make_key(keys, "--tenant", "acme", "--adapter", "lora-*")
    overrides = [*tls(certs), f"cluster_token={token}", f"router.keys={keys}"]
    async with running_cluster(tmp_path, *overrides) as cluster:
        await served(cluster, certs, key)
        shown = bearer("a-token-for-this-test")
        assert await attach_outcome(cluster, certs, "client", shown) == "PERMISSION_DENIED"
        assert await attach_outcome(cluster, certs, "router", shown) == "PERMISSION_DENIED"
        assert await attach_outcome(cluster, certs, "worker") == "UNAUTHENTICATED"
        assert await attach_outcome(cluster, certs, "worker", shown, hello=True) == "OK"
        stranger = make_certificates(tmp_path / "strange")
        assert await attach_outcome(cluster, stranger, "worker", shown) == "UNAVAILABLE"
        async with channel(cluster.router_address, certs, "client") as dialled:
            stub = router_pb2_grpc.RouterServiceStub(dialled)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListAdapters(router_pb2.ListAdaptersRequest(), timeout=TIMEOUT_SECONDS)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_without_keys_operators_are_known_by_their_certificates(tmp_path: Path):
    certs = make_certificates(tmp_path / "certs")
    async with running_cluster(tmp_path, *tls(certs)) as cluster:

        async def load(name: str) -> tuple[grpc.StatusCode, str]:
            request = router_pb2.LoadAdapterRequest(adapter=types_pb2.Adapter(adapter_id=f"of-{name}", rank=8))
            async with channel(cluster.router_address, certs, name) as dialled:
                call = router_pb2_grpc.RouterServiceStub(dialled).LoadAdapter(request, timeout=TIMEOUT_SECONDS)
                return await call.code(), await call.details()

        code, details = await load("client")
        assert (code, details.partition(" may not ")[0]) == (grpc.StatusCode.PERMISSION_DENIED, "this certificate")
        assert (await load("operator"))[0] is grpc.StatusCode.OK

        shown = ("--cert", str(certs / "worker.pem"), "--key", str(certs / "worker.key"))
        addresses = {name: cluster.processes[name].grpc for name in ("router", "scheduler", "worker-0")}
        for name, address in addresses.items():
            asked = probed(name.partition("-")[0])
            for service in ("", *asked):
                await wait_until(partial(healthy, *shown, address, service))
            assert (await healthcheck("--tls", address))[0] == 1, "a server that demands certificates"
            assert (await healthcheck(address))[0] == 1

        cluster.kill("scheduler")

        async def unready() -> bool:
            return (await healthcheck(*shown, addresses["worker-0"]))[0] == 1

        await wait_until(unready, what="a worker without a scheduler is not ready")
        await wait_until(partial(healthy, *shown, addresses["worker-0"], LIVENESS), what="and need not be restarted")


def served_serial(address: str, certs: Path) -> str:
    """Return the serial number of the certificate that a server shows now."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=str(certs / "ca.pem"))
    context.load_cert_chain(certs / "client.pem", certs / "client.key")
    with (
        socket.create_connection((host, int(port)), timeout=TIMEOUT_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        certificate = connection.getpeercert()
    assert certificate is not None
    return str(certificate["serialNumber"])


async def test_new_certificates_are_taken_up_without_a_restart(tmp_path: Path):
    certs = make_certificates(tmp_path / "certs")
    keys = tmp_path / "keys.toml"
    key = make_key(keys, "--tenant", "acme")
    async with running_cluster(tmp_path, *tls(certs), f"router.keys={keys}") as cluster:
        first = await asyncio.to_thread(served_serial, cluster.router_address, certs)
        make_certificates(certs)  # the same authority signs new ones

        async def renewed() -> bool:
            return await asyncio.to_thread(served_serial, cluster.router_address, certs) != first

        await wait_until(renewed, what="the router shows its new certificate")
        await served(cluster, certs, key)
        # Another authority altogether: who dials again does so with what it signed.
        for path in certs.glob("ca.*"):
            path.unlink()
        make_certificates(certs)
        cluster.kill("scheduler")
        await cluster.restart("scheduler")

        async def trusted() -> bool:
            try:
                await asyncio.to_thread(served_serial, cluster.router_address, certs)
            except ssl.SSLError:
                return False
            return True

        await wait_until(trusted, what="the router shows a certificate of the new authority")
        await served(cluster, certs, key)


async def test_certificates_that_come_while_a_scheduler_cannot_be_reached_are_taken_up(tmp_path: Path):
    certs = make_certificates(tmp_path / "certs")
    keys = tmp_path / "keys.toml"
    key = make_key(keys, "--tenant", "acme")
    lines: list[str] = []
    async with LocalCluster(
        write_settings(tmp_path), [*tls(certs), f"router.keys={keys}"], show=lambda _, line: lines.append(line)
    ) as cluster:
        cluster.kill("scheduler")
        await wait_until(lambda: any("shard_not_connected" in line for line in lines))
        for path in certs.glob("ca.*"):
            path.unlink()
        make_certificates(certs)  # of another authority
        await cluster.restart("scheduler")
        router = cluster.metrics_address("router")
        await wait_until(lambda: metric(router, "lorrery_router_shard_connected") == 1)
        await served(cluster, certs, key)


@pytest.mark.parametrize("protected", [False, True])
async def test_a_service_that_anybody_can_reach_says_so(tmp_path: Path, protected: bool):
    lines: list[str] = []
    keys, token = tmp_path / "keys.toml", make_token(tmp_path / "token")
    make_key(keys, "--tenant", "acme")
    certs = make_certificates(tmp_path / "certs")
    overrides = ["router.listen=0.0.0.0:0", "scheduler.listen=0.0.0.0:0"]
    if protected:
        overrides += [*tls(certs), f"router.keys={keys}", f"cluster_token={token}"]
    async with LocalCluster(write_settings(tmp_path), overrides, show=lambda name, line: lines.append(line)):
        pass
    warnings = [line for line in lines if "open_to_everybody" in line]
    assert len(warnings) == (0 if protected else 2), warnings
    assert not any("in_the_clear" in line for line in lines)
