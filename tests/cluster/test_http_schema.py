"""The HTTP edge before what its own OpenAPI document says, and before bodies that it forbids (schemathesis)."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.cluster.client import Ask, client_of
from tests.cluster.gauges import nothing_held
from tests.cluster.harness import running_cluster

pytestmark = pytest.mark.cluster

# Every body that the document allows need not be accepted: adapters are unknown, prompts are empty or too long.
CHECKS = ("--exclude-checks", "positive_data_acceptance")


@pytest.mark.timeout(300)
@pytest.mark.asyncio
async def test_every_route_answers_as_its_document_says_whatever_is_sent(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, "time_scale=0.02") as cluster, client_of(cluster) as client:
        beside = client.start(Ask(seed=1, max_new_tokens=2000))
        process = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).with_name("st")), "run", f"http://{cluster.http_address}/openapi.json"),
            *(*CHECKS, "--phases", "examples,fuzzing", "--max-examples", "8", "--seed", "1", "--no-color"),
            *("--generation-database", "none", "--request-timeout", "60", "--continue-on-failure"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        (await beside).check(cluster.settings)
        await nothing_held(cluster)
