"""A GPU that looks for a scheduler in vain."""

import asyncio

import pytest
from structlog.testing import capture_logs

from lorrery.worker import hosted
from tests.worker.fake_scheduler import FakeScheduler
from tests.worker.harness import running_worker


@pytest.mark.parametrize(
    ("scheduler", "reason"),
    [("127.0.0.1:1", "UNAVAILABLE: "), ("dns:///nowhere.invalid:50052", "the name has no address")],
)
@pytest.mark.parametrize(("after_seconds", "levels"), [(1e9, ["info"] * 3), (0.0, ["warning", "info", "info"])])
async def test_worker_that_never_attaches_warns_after_a_while_and_then_now_and_again(
    monkeypatch: pytest.MonkeyPatch, scheduler: str, reason: str, after_seconds: float, levels: list[str]
):
    monkeypatch.setattr(hosted, "FIRST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(hosted, "LAST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(hosted, "WARN_AFTER_SECONDS", after_seconds)
    monkeypatch.setattr(hosted, "WARN_EVERY_SECONDS", 1e9)
    nobody = FakeScheduler(1.0)
    nobody.address = scheduler
    with capture_logs() as lines:

        def said() -> list[dict[str, str]]:
            return [line for line in lines if line["event"] == "not_attached"]

        async with asyncio.timeout(60), running_worker(nobody):
            while len(said()) < 3:  # noqa: ASYNC110  lines are awaited
                await asyncio.sleep(0.001)
    assert [line["log_level"] for line in said()[:3]] == levels
    assert {line["scheduler"] for line in said()} == {scheduler}
    assert [line["reason"] for line in said() if not line["reason"].startswith(reason)] == []
