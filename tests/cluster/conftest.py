"""What several modules ask of the cluster that each of them has."""

from collections.abc import AsyncIterator

import pytest_asyncio
from openai import AsyncOpenAI

from lorrery.service.local.cluster import LocalCluster
from tests.cluster.http_client import openai_client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def openai(cluster: LocalCluster) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client of the module's cluster."""
    async with openai_client(cluster) as client:
        yield client
