"""However often something happens, it costs two lines a second for each kind."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from lorrery.service.telemetry import bounded_log
from lorrery.service.telemetry.bounded_log import BoundedLog
from lorrery.service.telemetry.log import get_logger


async def test_the_first_of_each_kind_is_logged_and_the_others_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_log, "WINDOW_SECONDS", 0.01)
    with capture_logs() as lines:
        log = BoundedLog(get_logger("test"), "refused")
        for number in range(1000):
            log.say("full", number=number)
        log.say("late", number=0)
        assert [_told(line) for line in lines] == [("refused", 0), ("refused", 0)]
        while len(lines) < 3:  # noqa: ASYNC110  until the window is over
            await asyncio.sleep(0.001)
        assert lines[2]["event"] == "refused_again"
        assert (lines[2]["kind"], lines[2]["num"]) == ("full", 999)
        log.say("full", number=7)
        assert _told(lines[3]) == ("refused", 7)


def _told(line: Any) -> tuple[str, int]:
    return line["event"], line["number"]
