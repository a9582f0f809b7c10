"""`lorrery top` of a record, in a terminal and without one."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.view.frame import decode_frame, decode_hello
from lorrery.view.top.command import app
from tests.view.fake import fake_record
from tests.view.top.terminal import IN, OUT, SHOW_CURSOR, Terminal


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("record") / "frames.ndjson.gz"
    fake_record(path, 20.0, num_workers=12)
    return path


def top(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result.output


def test_keys_move_through_a_record_and_the_terminal_is_given_back(record: Path) -> None:
    with closing(Terminal([str(record), "--at", "10"])) as terminal:
        terminal.until("worker-0", "PAUSED", "q quit")
        assert not terminal.is_as_before()
        terminal.press("3")
        terminal.until("TENANT", "greedy")
        terminal.press("\x1b[C")
        terminal.until("0:00:15.0")
        terminal.resize(120, 40)
        terminal.process.send_signal(signal.SIGWINCH)
        terminal.press("1")
        terminal.until("worker-11 ")
        terminal.process.send_signal(signal.SIGTSTP)
        wait_for(lambda: state_of(terminal.process.pid) == "T")
        assert terminal.is_as_before()
        assert OUT in terminal.rest()
        terminal.process.send_signal(signal.SIGCONT)
        terminal.until("worker-11 ")
        assert not terminal.is_as_before()
        terminal.press(" ")
        terminal.until("record x1", "0:00:20.0")  # the last frame, which stays
        terminal.press("q")
        code, written = terminal.end()
        assert (code, terminal.is_as_before()) == (0, True)
        assert OUT in written
        assert SHOW_CURSOR in written


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_gives_the_terminal_back_and_no_colour_means_none(record: Path, number: signal.Signals) -> None:
    with closing(Terminal([str(record), "--at", "10"], NO_COLOR="1")) as terminal:
        terminal.until("worker-0", "q quit")
        terminal.press("5")
        terminal.until("the events say why")
        terminal.process.send_signal(number)
        code, written = terminal.end()
        assert (code, terminal.is_as_before()) == (128 + number, True)
        assert OUT in written
        assert b"Traceback" not in written
        assert not re.search(rb"\x1b\[[0-9;]*3[0-7]m", terminal.all)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_record_that_is_none_is_an_error_on_the_usual_screen(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with closing(Terminal([str(tmp_path / "other.json")])) as one:
        code, written = one.end()
        assert (code, one.is_as_before()) == (1, True)
        assert b"not a record" in written
        assert IN not in written


def test_without_a_terminal_a_moment_is_printed(record: Path) -> None:
    printed = top(record, "--at", "10", "--once")
    for word in ("tokens/s", "WORKER", "worker-11", "ADAPTER", "TENANT", "greedy", "0:00:10.0"):
        assert word in printed
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 100
    alone = top(record, "--at", "10", "--view", "tenants", "--sort", "wait", "--filter", "GREEDY")
    assert "WAIT▼" in alone
    assert "greedy" in alone
    assert "globex" not in alone
    assert "WORKER" not in alone


def test_json_is_the_record_line_by_line(record: Path) -> None:
    hello, *frames = top(record, "--json").splitlines()
    assert decode_hello(hello.encode()).source == "record"
    assert [decode_frame(line.encode()).at for line in frames] == [n / 2 for n in range(41)]
    assert [json.loads(line).get("at") for line in top(record, "--json", "--once", "--at", 7).splitlines()] == [
        None,
        7.0,
    ]
    assert [json.loads(line).get("at") for line in top(record, "--json", "--once").splitlines()] == [None, 20.0]


def test_a_reader_that_has_enough_is_no_error(record: Path) -> None:
    command = [sys.executable, "-m", "lorrery.cli", "top", str(record), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"{")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--target", "127.0.0.1:1"], 1, "--target names the router of a cluster, and lorrery up starts one"),
        (["--target", "http://127.0.0.1:1"], 2, "try --target 127.0.0.1:1"),
        (["--at", "3"], 2, "--at 3: this is for records; name a RECORD"),
        (["nowhere"], 1, "nowhere: no such file"),
        (["RECORD", "--target", "127.0.0.1:1"], 2, "give either a record or a cluster"),
        (["RECORD", "--at", "99"], 2, "--at 99: the record ends at 20 s"),
        (["RECORD", "--view", "tenant"], 2, "--view tenant: there are workers, adapters, tenants"),
        (["RECORD", "--view", "tenants", "--sort", "kv"], 2, "--sort kv: no such column; tenants: tenant, run, wait"),
    ],
)
def test_errors_name_the_value_and_the_cure(record: Path, arguments: list[str], code: int, message: str) -> None:
    given = [str(record) if word == "RECORD" else word for word in arguments]
    result = CliRunner().invoke(app, given)
    assert (result.exit_code, message in result.output) == (code, True), result.output
