"""`lorrery serve` answers the corpus as a real vLLM does that has the same flags."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lorrery.service.local.processes import start_python
from tests.conformance.compare import differing
from tests.conformance.sending import FLAGS, SERVERS, answers, recorded
from tests.conformance.wanted import WANTED, unwanted
from tests.router.adapter_folder import write_adapter

OURS = ("--speedup-ratio", "1000", "--tokenizer", "src/lorrery/tokenizer/shipped", "--port", "0")
READY = re.compile(r"ready: http://127\.0\.0\.1:(\d+) ")


@asynccontextmanager
async def serving(folder: Path, server: str) -> AsyncIterator[int]:
    """Run the engine; yield its port."""
    adapters = [f"{name}={write_adapter(folder / name)}" for name in ("l0", "l1")]
    flags = [*FLAGS, *SERVERS[server], "--lora-modules", *adapters, *OURS]
    model = "meta-llama/Llama-3.1-8B-Instruct"
    process = await start_python(["-m", "lorrery.cli", "serve", model, *flags], stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        found = READY.match((await process.stdout.readline()).decode())
        assert found is not None
        yield int(found[1])
    finally:
        process.kill()
        await process.communicate()


@pytest.mark.cluster
@pytest.mark.parametrize("server", SERVERS)
async def test_answers_are_a_real_vllms_but_for_what_is_wanted(server: str, tmp_path: Path) -> None:
    pairs = recorded(server)
    async with serving(tmp_path, server) as port:
        ours = await asyncio.to_thread(lambda: list(answers(port, [case for case, _ in pairs])))
    wrong = {}
    for (case, theirs), own in zip(pairs, ours, strict=True):
        if found := unwanted(case.name, differing(case, theirs, own)):
            wrong[case.name] = found
    assert wrong == {}


def test_each_wanted_difference_has_requests() -> None:
    names = [case.name for server in SERVERS for case, _ in recorded(server)]
    assert [one for one in WANTED if not any(re.search(one.request, name) for name in names)] == []
