import asyncio
import json
import os
import re
import signal
import socket
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lorrery.cli.up_cluster import credentials, running_targets
from lorrery.service.errors import LorreryError
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.local.monitoring import TARGETS, Monitoring
from lorrery.service.local.processes import start_python
from lorrery.service.settings.cluster import Settings
from tests.cluster.client import Ask, Client, error_info
from tests.cluster.harness import SETTINGS, StartCluster, alive, ignored, metric, services, wait_until, write_settings

pytestmark = pytest.mark.cluster

PLAIN = ("", "")
SERVICES = 4  # scheduler, two workers, router


class Up:
    """`lorrery up` as a process, and what it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    @classmethod
    async def start(cls, *arguments: str) -> "Up":
        pipe = asyncio.subprocess.PIPE
        return cls(
            await start_python(["-m", "lorrery.cli", "up", *arguments], stdout=pipe, stderr=asyncio.subprocess.STDOUT)
        )

    async def wait_for(self, text: str) -> str:
        """Return the next line that contains `text`."""
        while text not in (line := await self._line()):
            assert line, f"ended without {text!r}:\n{''.join(self.lines)}"
        return line

    async def end(self) -> int:
        """Return the exit code, once it has ended."""
        while await self._line():
            pass
        return await self.process.wait()

    async def gone(self) -> None:
        """Kill it if it still runs."""
        if self.process.returncode is None:
            self.process.kill()
        await self.end()

    async def _line(self) -> str:
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        self.lines.append(line)
        return line

    def services(self) -> dict[int, str]:
        """Return pid and service of its processes."""
        return services(self.process.pid)

    def pid_of(self, service: str) -> int:
        return next(pid for pid, name in self.services().items() if name == service)


def read_json(url: str):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.loads(answer.read())


def targets_of(folder: Path) -> dict[str, str]:
    """Return what Prometheus is told: address by name."""
    groups = json.loads((folder / TARGETS).read_text())
    return {group["labels"]["instance"]: group["targets"][0] for group in groups}


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Up]:
    """A cluster of `lorrery up` that serves."""
    running = await Up.start("--config", str(write_settings(tmp_path)), "--workers", "2")
    try:
        await running.wait_for("try: lorrery load --target")
        yield running
    finally:
        await running.gone()


async def test_up_tells_where_things_are_and_one_ctrl_c_stops_them_in_order(up: Up):
    pids = up.services()
    assert sorted(pids.values()) == ["router", "scheduler", "worker", "worker"]
    text = "".join(up.lines)
    page = re.search(r"watch it: (http://127\.0\.0\.1:\d+)", text)
    assert page, text
    assert read_json(page[1] + "/hello")["model"] == "Llama-3-8B"
    for name in ("router", "scheduler", "worker-0", "worker-1"):
        match = re.search(rf"lorrery +\|   {name} +(127\.0\.0\.1:\d+) +http://(127\.0\.0\.1:\d+)/metrics", text)
        assert match, text
        assert metric(match[2], "lorrery_service_state", state="ready") == 1
    folder = Path(re.findall(r"prometheus --config\.file=(\S+)/prometheus\.yml", text)[0])
    assert targets_of(folder) == dict(
        re.findall(r"(\w+(?:-\d)?) +127\.0\.0\.1:\d+ +http://(127\.0\.0\.1:\d+)/metrics", text)
    )

    up.process.send_signal(signal.SIGINT)
    assert await up.end() == 0, "".join(up.lines)
    assert not [pid for pid in pids if alive(pid)]
    stopped = [line.split("|")[0].strip() for line in up.lines if re.search(r"\bstopped\b", line)]
    assert stopped[0] == "router"
    assert set(stopped[1:3]) == {"worker-0", "worker-1"}
    assert stopped[3:] == ["scheduler"]
    assert not (await asyncio.to_thread(folder.exists))


async def test_sigterm_stops_everything_too(up: Up):
    pids = up.services()
    up.process.send_signal(signal.SIGTERM)
    assert await up.end() == 0
    assert not [pid for pid in pids if alive(pid)]


async def test_a_cluster_under_nohup_outlives_its_terminal(tmp_path: Path):
    with ignored(signal.SIGHUP):  # as nohup leaves it to its program
        up = await Up.start("--config", str(write_settings(tmp_path)), "--workers", "1")
    try:
        await up.wait_for("try: lorrery load --target")
        up.process.send_signal(signal.SIGHUP)
        up.process.send_signal(signal.SIGTERM)  # behind it: a higher number is handled later
        assert await up.end() == 0, "the first of two signals drains, a second one kills"
    finally:
        await up.gone()


async def test_no_process_survives_a_killed_parent(up: Up):
    pids = up.services()
    assert len(pids) == SERVICES
    up.process.kill()
    await wait_until(lambda: not any(alive(pid) for pid in pids))


async def test_cluster_stops_when_nobody_reads_its_output(tmp_path: Path):
    read, write = os.pipe()
    process = await start_python(
        ["-m", "lorrery.cli", "up", "--config", str(write_settings(tmp_path)), "--workers", "1"],
        stdout=write,
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(write)
    os.close(read)
    _, error = await process.communicate()
    assert process.returncode in (0, 128 + signal.SIGTERM)
    assert error == b""


async def test_a_cluster_serves_and_stops_though_its_output_finds_no_room(tmp_path: Path):
    monitoring = tmp_path / "monitoring"
    arguments = ("--config", str(write_settings(tmp_path)), "--workers", "1", "--monitoring", str(monitoring))
    full = os.open("/dev/full", os.O_WRONLY)
    process = await start_python(["-m", "lorrery.cli", "up", *arguments], stdout=full, stderr=full)
    os.close(full)
    targets = monitoring / TARGETS

    def serves() -> bool:
        assert process.returncode is None
        found = targets_of(monitoring) if targets.exists() else {}
        return "router" in found and metric(found["router"], "lorrery_service_state", state="ready") == 1

    await wait_until(serves, timeout_seconds=60)
    process.terminate()
    assert await process.wait() in (0, 128 + signal.SIGTERM)


@pytest.mark.parametrize("victim", ["scheduler", "worker", "router"])
async def test_process_that_dies_is_named_and_ends_the_rest(up: Up, victim: str):
    pids = up.services()
    killed = await asyncio.create_subprocess_exec("kill", "-KILL", str(up.pid_of(victim)))
    await killed.wait()
    line = await up.wait_for("ended unexpectedly with signal 9; stopping the rest")
    assert victim in line
    assert await up.end() == 1
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize(("victim", "reason"), [("worker", "NO_WORKER"), ("scheduler", "NO_SCHEDULER")])
async def test_streams_end_at_once_when_the_only_one_of_a_service_dies_for_good(
    tmp_path: Path, victim: str, reason: str
):
    settings = ("scheduler.worker_wait_seconds=1000", "router.resume_timeout_seconds=1000", "router.drain_seconds=1000")
    waits = [part for setting in settings for part in ("--set", setting)]
    up = await Up.start("--config", str(write_settings(tmp_path)), "--workers", "1", "--set", "time_scale=100", *waits)
    try:
        target = (await up.wait_for("try: lorrery load --target")).split()[-1]
        async with Client(target) as client:
            stream = client.start(Ask(1, max_new_tokens=100))
            await stream.at(1)
            os.kill(up.pid_of(victim), signal.SIGKILL)
            await stream
        assert stream.error is not None
        assert error_info(stream.error)[0] == reason
        assert await up.end() == 1
    finally:
        await up.gone()


async def test_with_restart_a_killed_process_runs_again_where_it_was(tmp_path: Path):
    folder = tmp_path / "monitoring"
    Monitoring(folder).write()
    (folder / "rules" / "alerts.yml").write_text("groups: []\n")
    arguments = ("--config", str(write_settings(tmp_path)), "--workers", "1", "--restart", "--monitoring", str(folder))
    up = await Up.start(*arguments)
    try:
        target = (await up.wait_for("try: lorrery load --target")).split()[-1]
        for victim, service in (("worker-0", "worker"), ("router", "router")):
            os.kill(up.pid_of(service), signal.SIGKILL)
            await up.wait_for(f"{victim} ended with signal 9; it starts again in 0.5 s")
            line = await up.wait_for(f"{victim} runs again, pid ")
            assert int(line.split()[-1]) == up.pid_of(service)
        assert targets_of(folder).keys() == {"scheduler", "worker-0", "router"}
        async with Client(target) as client:
            stream = await client.start(Ask(1, max_new_tokens=3))
            assert stream.finish is not None, stream.error
            assert stream.finish.usage.worker_id == "worker-0"
        up.process.send_signal(signal.SIGINT)
        assert await up.end() == 0, "".join(up.lines)
        assert targets_of(folder) == {}
        assert (folder / "rules" / "alerts.yml").read_text() == "groups: []\n", "what was changed there is kept"
    finally:
        await up.gone()


async def test_fault_kills_a_worker_and_starts_it_again_and_others_are_the_services_own(tmp_path: Path):
    loss, slow = "worker_loss,at=0.1,worker=worker-1,for=0.5", "slow_worker,at=0,worker=worker-0,factor=100"
    arguments = ("--config", str(write_settings(tmp_path)), "--fault", loss, "--fault", slow)
    up = await Up.start(*arguments, "--set", "scheduler.policy=fcfs")
    try:
        await up.wait_for(f"fault {loss}: worker-1 is killed")
        await up.wait_for(f"fault {loss}: over")
        await up.wait_for("worker-1 runs again, pid ")
        match = re.search(r"worker-0 +127\.0\.0\.1:\d+ +http://(\S+)/metrics", "".join(up.lines))
        target = re.search(r"--target (\S+)", "".join(up.lines))
        assert match
        assert target
        async with Client(target[1]) as client:
            streams = [client.start(Ask(seed, max_new_tokens=3)) for seed in range(8)]
            await wait_until(lambda: all(stream.over for stream in streams), what="the ends of eight streams")
        decodes = metric(match[1], "lorrery_worker_steps_total", kind="decode")
        assert metric(match[1], "lorrery_worker_step_modelled_seconds_sum") > 0.3 * decodes > 0
        up.process.send_signal(signal.SIGINT)
        assert await up.end() == 0, "".join(up.lines)
    finally:
        await up.gone()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("flood,at=1", "fault flood,at=1: 'flood' is none of worker_loss, slow_worker, freeze_worker"),
        ("worker_loss,at=1,worker=worker-2", "no such worker; there are worker-0, worker-1"),
        ("adapter_load_failure,at=1,adapter=ghost", "no such adapter in adapters.registry"),
    ],
)
async def test_fault_that_cannot_be_is_one_line_and_exit_code_2(tmp_path: Path, fault: str, message: str):
    up = await Up.start("--config", str(write_settings(tmp_path)), "--fault", fault)
    assert await up.end() == 2
    assert message in up.lines[0]
    assert len(up.lines) == 2


async def test_second_ctrl_c_kills_what_does_not_stop(up: Up):
    pids = up.services()
    stopped = await asyncio.create_subprocess_exec("kill", "-STOP", str(up.pid_of("router")))
    await stopped.wait()
    up.process.send_signal(signal.SIGINT)
    router = up.pid_of("router")
    # The first one has been taken note of once the router has a SIGTERM pending.
    await wait_until(lambda: _pending(router, signal.SIGTERM), what="SIGTERM pending")
    up.process.send_signal(signal.SIGINT)
    assert await up.end() == 130
    assert not [pid for pid in pids if alive(pid)]


def _pending(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return any(
        int(mask, 16) >> (number - 1) & 1 for mask in re.findall(r"^(?:ShdPnd|SigPnd):\s*(\w+)", status, re.MULTILINE)
    )


async def test_wrong_setting_is_one_line_and_exit_code_2(tmp_path: Path):
    up = await Up.start("--config", str(write_settings(tmp_path)), "--set", "scheduler.polici=x")
    assert await up.end() == 2
    assert up.lines == [
        "lorrery: error: scheduler.polici: no such setting; did you mean scheduler.policy? (--set)\n",
        "",
    ]


async def test_service_that_cannot_start_ends_everything(tmp_path: Path):
    up = await Up.start("--config", str(write_settings(tmp_path)), "--set", "worker.gpu=Abacus")
    assert await up.end() == 1
    text = "".join(up.lines)
    assert re.search(r"worker-\d ended with exit code", text)
    assert "Abacus" in text
    assert "Traceback" not in text


async def test_taken_port_is_named_and_free_ports_let_a_second_cluster_run(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = write_settings(
            tmp_path, SETTINGS.replace('metrics = "127.0.0.1:0"', f'metrics = "127.0.0.1:{port}"')
        )
        first = await Up.start("--config", str(settings), "--workers", "1")
        assert await first.end() == 1
        text = "".join(first.lines)
        assert f"scheduler.metrics: address 127.0.0.1:{port} cannot be taken: Address already in use" in text
        assert "lorrery up --free-ports" in text
        second = await Up.start("--config", str(settings), "--workers", "1", "--free-ports")
        await second.wait_for("try: lorrery load --target 127.0.0.1:")
        second.process.send_signal(signal.SIGINT)
        assert await second.end() == 0
    addresses = re.findall(r"127\.0\.0\.1:(\d+)", "".join(line for line in second.lines if "/metrics" in line))
    assert len(set(addresses)) == 6
    assert str(port) not in addresses


def test_free_ports_leave_hosts_and_explicit_settings_alone():
    overrides = ["router.listen=127.0.0.1:6000", "worker.metrics=0.0.0.0:9103"]
    settings = LocalCluster(None, overrides, free_ports=True).settings
    assert settings.router.listen == "127.0.0.1:6000"
    assert settings.worker.metrics == "0.0.0.0:9103"
    assert settings.router.metrics == settings.scheduler.listen == "127.0.0.1:0"


async def test_killed_process_starts_again_on_its_ports_even_after_starts_that_failed(start_cluster: StartCluster):
    cluster: LocalCluster = await start_cluster()
    before = cluster.processes["scheduler"]
    assert {target.name for target in running_targets(cluster)} == {"scheduler", "worker-0", "router"}
    cluster.kill("scheduler")
    assert await cluster.ended("scheduler") == -signal.SIGKILL
    assert {target.name for target in running_targets(cluster)} == {"worker-0", "router"}
    with socket.create_server(("127.0.0.1", int(before.metrics.rpartition(":")[2]))):
        for _ in range(2):
            with pytest.raises(LorreryError, match=f"address {before.metrics} cannot be taken"):
                await cluster.restart("scheduler")
            assert cluster.scheduler_address == before.grpc  # that a worker dials which starts meanwhile
    await cluster.restart("scheduler")
    after = cluster.processes["scheduler"]
    assert (after.grpc, after.metrics) == (before.grpc, before.metrics)
    assert after.pid != before.pid
    await cluster.serving("router")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, PLAIN),
        ({"client_tls": {"ca": "ca.pem"}}, PLAIN),  # the cluster itself has none
        (
            {"server_tls": {"cert": "c.pem", "key": "c.key"}, "client_tls": {"ca": "my ca.pem"}},
            ("LORRERY_CLIENT_TLS__CA='my ca.pem' ", ""),
        ),
        ({"router": {"keys": "keys.toml"}}, ("", " --api-key KEY")),
    ],
    ids=["none", "client only", "TLS", "keys"],
)
def test_suggested_commands_say_what_they_need(settings, expected):
    assert credentials(Settings.model_validate(settings)) == expected
