"""However often something happens, and whatever is sent, the log is bounded.

However often something happens, it costs two lines a second for each kind.
"""

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from structlog.testing import capture_logs

from lorrery.service.telemetry import log as bounded_log
from lorrery.service.telemetry.log import BoundedLog, get_logger

PROGRAM = """
import logging, sys
from lorrery.service.telemetry import log as module
from lorrery.service.telemetry.log import configure, get_logger
from lorrery.service.settings.sections import LogSettings

configure(LogSettings(format=sys.argv[1]), "test")
log = get_logger("test")

def fails(depth):
    return fails(depth - 1) if depth else 1 / 0

for number in range(5_000):
    log.info("frequent", number=number)
    try:
        fails(number % 900)
    except ZeroDivisionError:
        log.exception("failed", number=number)
        logging.getLogger("asyncio").exception("in %s", number)
    log.info("long", text="x" * 50_000, names=["y" * 10] * 10_000)
log.info("rare", text="\\x1b[2J\\u2028\\ud800 \\n", number=1)
now = module.time.monotonic()
module.time.monotonic = lambda: now + 100
log.info("frequent", number=-1)
logging.getLogger("asyncio").warning("again")
"""


def logged(form: str) -> str:
    program = [sys.executable, "-c", PROGRAM, form]
    return subprocess.run(program, capture_output=True, check=True, text=True).stderr


def test_each_event_has_a_hundred_lines_at_once_and_three_tracebacks():
    lines = [json.loads(line) for line in logged("json").splitlines()]
    of = {name: [line for line in lines if line["event"] == name] for name in ("frequent", "failed", "rare", "again")}
    assert 101 <= len(of["frequent"]) <= 150  # some seconds may pass
    assert sum(line.get("lines_left_out", 0) for line in of["frequent"]) + len(of["frequent"]) == 5_001
    assert len([line for line in of["failed"] if "exception" in line]) == 3
    assert of["failed"][-1]["error"] == "ZeroDivisionError('division by zero')"
    assert of["rare"][0]["text"] == "\\x1b[2J\\u2028\\ud800 \n"
    (again,), of_library = of["again"], [line for line in lines if line["event"].startswith("in ")]
    assert len(of_library) == len([line for line in of_library if "exception" in line]) == 3
    assert again["lines_left_out"] == 4_997


def test_no_value_and_no_traceback_is_long():
    for form in ("json", "console"):
        log = logged(form)
        assert len(log) < 500_000
        assert max(map(len, log.splitlines())) < 10_000
        assert log.count("Traceback") == 6


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
