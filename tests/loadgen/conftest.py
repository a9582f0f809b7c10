import json
import os
import pathlib

import pytest

from tests.loadgen.fake_router import FakeRouter

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
async def start_router():
    """Start fake routers; they are stopped after the test."""
    started = []

    async def start(**arguments):
        router = FakeRouter(**arguments)
        await router.start()
        started.append(router)
        return router

    yield start
    for router in started:
        await router.server.stop(None)


@pytest.fixture
def golden_cases():
    """Read a kind's cases: the committed excerpt, and the whole file where there is one."""

    def read(kind):
        shared = pathlib.Path(os.environ.get("LORRERY_SHARED", ROOT / ".." / "shared"))
        cases = []
        for path in (ROOT / "tests" / "golden" / f"{kind}.jsonl", shared / "golden" / f"{kind}.jsonl"):
            if path.exists():
                lines = path.read_text(encoding="utf-8").splitlines()
                cases += [case for case in map(json.loads, lines) if "id" in case or "params" in case]
            else:
                print(f"not there, so not checked: {path}")
        assert cases
        return cases

    return read
