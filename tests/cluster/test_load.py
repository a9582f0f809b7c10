"""`lorrery load` against `lorrery up`, both as a user starts them, and what is left when the first is interrupted."""

import asyncio
import csv
import json
import re
import signal
from pathlib import Path

import pytest

from lorrery.service.local.processes import start_python
from tests.cluster.gauges import HELD
from tests.cluster.harness import alive, metric, services, wait_until, write_settings

pytestmark = pytest.mark.cluster

NUM_REQUESTS = 60
ADAPTERS = ("lora-0", "lora-1", "lora-2", "lora-3", "big")


async def _read_until(process: asyncio.subprocess.Process, text: str) -> list[str]:
    """Return what it printed up to a line with `text`."""
    assert process.stdout is not None
    lines: list[str] = []
    while text not in (lines[-1] if lines else ""):
        line = (await process.stdout.readline()).decode()
        assert line, f"ended without {text!r}:\n{''.join(lines)}"
        lines.append(line)
    return lines


async def test_load_runs_through_a_cluster_of_up_and_ctrl_c_leaves_no_process(tmp_path: Path):
    up = await start_python(
        ["-m", "lorrery.cli", "up", "--config", str(write_settings(tmp_path)), "--workers", "2"],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        ready = "".join(await _read_until(up, "try: lorrery load --target"))
        target = ready.rsplit("--target ", 1)[1].strip()
        running = set(services(up.pid))
        assert len(running) == 4

        given = ("-n", str(NUM_REQUESTS), "-c", "16", "--warmup", "0", "--out", str(tmp_path))
        code, output = await _load("--target", target, *given)
        assert code == 0, output
        report = json.loads((tmp_path / "summary.json").read_text())
        summary = report["summary"]
        assert summary["num_completed"] == NUM_REQUESTS
        assert summary["num_failed"] == 0
        assert len((tmp_path / "requests.csv").read_text().splitlines()) == NUM_REQUESTS + 1
        # Nothing of it is left, and every service has counted the same.
        addresses = dict(re.findall(r"(router|scheduler|worker-\d) .*http://(\S+)/metrics", ready))
        assert len(addresses) == 4
        held = [(address, gauge) for name, address in addresses.items() for gauge in HELD[name.partition("-")[0]]]
        await wait_until(lambda: not any(metric(address, gauge) for address, gauge in held), what="nothing held")
        assert metric(addresses["router"], "lorrery_router_requests_total", outcome="ok") == NUM_REQUESTS
        with (tmp_path / "adapters.csv").open(encoding="utf-8", newline="") as file:
            assert [row["adapter_id"] for row in csv.DictReader(file)] == sorted(ADAPTERS)
        total, scheduler = report["adapter_loads"]["total"], addresses["scheduler"]
        assert total["num_loads"] == metric(scheduler, "lorrery_scheduler_adapter_loads_total") > 0
        seconds = metric(scheduler, "lorrery_scheduler_adapter_load_seconds_sum")
        assert total["host_load_seconds"] + total["disk_load_seconds"] == pytest.approx(seconds)
        assert 0 < total["resident_seconds"] < (summary["duration_seconds"] + 1) * 2 * len(ADAPTERS)

        up.send_signal(signal.SIGINT)
        await _read_until(up, "stopped")
        assert up.stdout is not None
        await up.stdout.read()
        assert await up.wait() == 0
        assert not [pid for pid in running if alive(pid)]
    finally:
        if up.returncode is None:
            up.kill()
            await up.communicate()


async def _load(*arguments: str) -> tuple[int | None, str]:
    process = await start_python(
        [
            "-m",
            "lorrery.cli",
            "load",
            "--adapters",
            "all",
            "--input-range",
            "1:200",
            "--output-range",
            "1:40",
            *arguments,
        ],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_killed_up_leaves_no_process_even_in_the_middle_of_load(tmp_path: Path):
    up = await start_python(
        ["-m", "lorrery.cli", "up", "--config", str(write_settings(tmp_path)), "--workers", "2"],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        ready = "".join(await _read_until(up, "try: lorrery load --target"))
        target = ready.rsplit("--target ", 1)[1].strip()
        router = dict(re.findall(r"(router) .*http://(\S+)/metrics", ready))["router"]
        running = services(up.pid)
        load = asyncio.create_task(_load("--target", target, "-n", "10000", "-c", "16"))
        await wait_until(lambda: metric(router, "lorrery_router_in_flight_requests") > 0)
        up.kill()
        await wait_until(lambda: not any(alive(pid) for pid in running))
        code, output = await load
        assert code == 1, output
    finally:
        if up.returncode is None:
            up.kill()
        await up.communicate()
