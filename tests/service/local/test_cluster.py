"""What a local cluster's processes do that are not as usual, without processes."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorrery.service.errors import LorreryError
from lorrery.service.local.cluster import LocalCluster
from lorrery.service.local.processes import ServiceProcess


async def test_who_waits_for_a_process_that_is_killed_while_it_starts_hears_of_its_end(tmp_path: Path) -> None:
    killed: Any = SimpleNamespace(returncode=-9)
    cluster = LocalCluster()
    cluster.processes["worker-0"] = ServiceProcess(
        "worker-0", "worker", [], killed, tmp_path / "announced.json", exit_expected=True
    )
    with pytest.raises(LorreryError, match="worker-0 ended with exit code -9 before"):
        async with asyncio.timeout(60):
            await cluster.listening("worker-0")
