"""Floods of TLS handshakes, by a client that has no certificate; the streams beside them do not notice."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from lorrery.service.local.cluster import LocalCluster
from lorrery.v1 import router_pb2_grpc
from tests.cluster.client import TIMEOUT_SECONDS, Stream
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import running_cluster
from tests.cluster.test_secure import channel, make_certificates, tls
from tests.hostile.conftest import INNOCENT
from tests.hostile.handshakes import KINDS
from tests.hostile.watch import MEGABYTE, watched

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]

ATTACK_SECONDS = 1
LOG_BYTES = 20_000
PEAK_BYTES = {"http": 100 * MEGABYTE, "grpc": 350 * MEGABYTE}
"""gRPC's core takes 40 kB for a connection, whatever it is used for."""
GAP_SECONDS = {"http": 0.25, "grpc": 1.0}
"""gRPC's own threads do the work there, and their CPU time counts, though others do not wait for it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[LocalCluster, Path]]:
    """A cluster whose gRPC ports require certificates, and whose HTTP edge has one; with the folder of all of them."""
    folder = tmp_path_factory.mktemp("cluster")
    certs = make_certificates(folder / "certs")
    http = [f"router.http_tls.{name}={certs / 'router'}.{suffix}" for name, suffix in (("cert", "pem"), ("key", "key"))]
    async with running_cluster(folder, *tls(certs), *http, num_workers=1) as cluster:
        yield cluster, certs


@pytest.mark.parametrize(("service", "port"), [("router", "http"), ("router", "grpc"), ("scheduler", "grpc")])
async def test_floods_of_handshakes(
    secured: tuple[LocalCluster, Path], service: str, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, certs = secured
    victim = cluster.processes[service]
    address = victim.http if port == "http" else victim.grpc
    async with channel(cluster.router_address, certs, "client") as dialled, watched(victim, certs) as watch:
        stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(dialled)
        for kind in KINDS:
            streams = [Stream(INNOCENT, stub.Generate(INNOCENT.message(), timeout=TIMEOUT_SECONDS)) for _ in range(4)]
            for stream in streams:
                await stream.at(1)
            capsys.readouterr()
            attack = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.hostile.handshakes", kind, address, str(ATTACK_SECONDS)),
                stdout=asyncio.subprocess.PIPE,
            )
            assert int((await attack.communicate())[0]) > 50, kind
            assert len(logged := capsys.readouterr().out) < LOG_BYTES, (kind, logged[:LOG_BYTES])
            for stream in streams:
                assert (await stream).check(cluster.settings).num_requeues == 0, kind
        figures = await watch.figures()
    assert figures.peak_bytes < PEAK_BYTES[port], figures
    assert figures.gap_seconds < GAP_SECONDS[port], figures
    await nothing_held(cluster)
