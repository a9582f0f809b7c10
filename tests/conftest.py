"""Fixtures for all tests."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import settings

from tests.cluster.harness import StartCluster, running_cluster

settings.register_profile("untimed", deadline=None)  # how long an example takes says something of the machine
settings.load_profile("untimed")


@pytest.fixture
async def start_cluster(tmp_path: Path) -> AsyncIterator[StartCluster]:
    """Return a function that starts a cluster of real processes; the test's end stops it."""
    async with AsyncExitStack() as stack:

        async def start(*overrides: str, num_workers: int = 1):
            return await stack.enter_async_context(running_cluster(tmp_path, *overrides, num_workers=num_workers))

        yield start
