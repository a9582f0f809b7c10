"""Services that are forked: what each has of its own, how their ends are seen, and that none is left over."""

import os
import selectors
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorrery.service.errors import LorreryError
from lorrery.service.local import fork_server
from lorrery.service.local.processes import Forked, ForkServer
from tests.cluster.harness import SETTINGS, alive, wait_until, write_settings

PROC = Path("/proc")


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


async def listening(server: ForkServer, folder: Path, *overrides: str) -> Forked:
    """Start a scheduler, and return it once it listens."""
    announce = folder / "announce.json"
    arguments = ["--config", str(write_settings(folder)), "--announce", str(announce)]
    process = await server.start("scheduler", [*arguments, *(part for one in overrides for part in ("--set", one))])
    await wait_until(announce.exists)
    return process


async def until_imported(server: ForkServer) -> None:
    process = await server.start("scheduler", ["--version"])
    assert (await process.stdout.read()).startswith(b"lorrery scheduler ")
    assert await process.wait() == 0


async def end(process: Forked) -> None:
    process.send_signal(signal.SIGKILL)
    await process.stdout.read()
    assert await process.wait() == -signal.SIGKILL


async def test_service_exits_with_0_after_a_drain_and_what_it_printed_is_there(server: ForkServer, tmp_path: Path):
    process = await listening(server, tmp_path)
    assert process.returncode is None
    process.send_signal(signal.SIGTERM)
    output = (await process.stdout.read()).decode()
    assert output.index("listening") < output.index("draining") < output.index("stopped")
    assert await process.wait() == process.returncode == 0
    process.send_signal(signal.SIGTERM)  # of no effect, and no error


async def test_service_with_wrong_settings_exits_with_2(server: ForkServer):
    process = await server.start("worker", ["--set", "worker.gpux=A100"])
    assert (
        await process.stdout.read()
        == b"worker: error: worker.gpux: no such setting; did you mean worker.gpu? (--set)\n"
    )
    assert await process.wait() == 2


async def test_killed_service_is_seen_to_be_killed_and_leaves_the_others(server: ForkServer, tmp_path: Path):
    first = await listening(server, tmp_path)
    (tmp_path / "second").mkdir()
    second = await listening(server, tmp_path / "second")
    await end(first)  # its output ends too, though the second was forked while it was open
    assert alive(second.pid)
    await end(second)


async def test_service_has_the_environment_and_folder_of_its_start(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    await until_imported(server)  # in an older environment
    monkeypatch.setenv("LORRERY_MODEL", "no-such-model")
    monkeypatch.chdir(tmp_path)
    write_settings(tmp_path, SETTINGS.replace('model = "Llama-3-8B"', ""))
    process = await server.start("worker", ["--config", "cluster.toml"])
    assert b"no-such-model" in await process.stdout.read()
    assert await process.wait() == 2


async def test_services_are_one_process_group_and_ps_shows_how_to_start_one_by_hand(server: ForkServer, tmp_path: Path):
    process = await listening(server, tmp_path, "log.level=info")
    assert os.getpgid(process.pid) == os.getsid(process.pid) == server.pid != os.getsid(0)
    command = (PROC / str(process.pid) / "cmdline").read_text().rstrip("\0")
    assert "-m lorrery.scheduler --config" in command
    assert command.endswith("--set log.level=info")
    await end(process)


async def test_no_service_survives_a_killed_fork_server(tmp_path: Path):
    with ForkServer() as server:
        process = await listening(server, tmp_path)
        os.kill(server.pid, signal.SIGKILL)
        await process.stdout.read()
        assert await process.wait() == -signal.SIGKILL
        await wait_until(lambda: not alive(process.pid))
        with pytest.raises(LorreryError, match=f"pid {server.pid}, has ended"):
            await server.start("scheduler", [])


async def test_fork_server_that_is_closed_while_it_imports_is_gone():
    with ForkServer() as server:
        pass
    assert not alive(server.pid)


async def test_fork_server_that_ends_while_it_imports_is_an_error():
    with ForkServer() as server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(LorreryError, match="has ended"):
            await server.start("scheduler", [])


async def test_fork_server_runs_one_thread_however_much_it_has_imported(server: ForkServer):
    await until_imported(server)
    assert len([*(PROC / str(server.pid) / "task").iterdir()]) == 1


def test_child_closes_the_fork_servers_socket_and_not_its_number_alone():
    # Its number is gRPC's a moment later; a second close, when Python is done with the object, would end the service.
    ours, theirs = socket.socketpair()
    with theirs, selectors.DefaultSelector() as selector:
        selector.register(ours, selectors.EVENT_READ)
        fork_server._close_all(selector)
        assert ours.fileno() == -1


def test_the_end_of_who_asks_for_processes_is_the_end_of_messages_even_if_it_has_read_none() -> None:
    asks, control = socket.socketpair()
    with control:
        control.sendall(b"ready")
        asks.close()
        assert fork_server._receive(control) is None
