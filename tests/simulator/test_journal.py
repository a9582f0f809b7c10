"""Reading a journal: what is cut off is told, what makes no sense is an error that names the line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lorrery.scheduler.subscribers.journal import Journal
from lorrery.service.errors import FormatError
from lorrery.service.settings.cluster import changed
from lorrery.simulator.replay.journal import ExpectedPlan, ExpectedStep, read_journal
from lorrery.simulator.replay.parts import parts_of
from lorrery.simulator.replay.replay import replay

HEADER = {"format_version": 2, "kind": "journal", "lorrery": "0.1.0", "settings": {"model": "m"}}
ATTACHED = {"type": "attached", "worker": 0, "at_ps": 0, "hello": {}}
STEPS = {
    "type": "steps",
    "worker": 0,
    "start_ps": 10,
    "durations_ps": [5, 7],
    "checksums": [1, 2],
    "gaps_ps": [[1, 100]],
    "events": [[1, {"finished": [[3, "eos", 2]]}]],
}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def test_a_journal_of_a_worker_that_was_lost_twice_replays(path: Path) -> None:
    losses = [f"worker_loss,at={at},worker=worker-0" for at in (5, 20)]
    settings = changed({"autoscaler": {"enabled": True}, "faults": losses})
    Journal(path, settings, {}).close()
    read = read_journal(path)
    assert replay(read, parts_of(read, path)).differences == []


def test_steps_are_spelt_out_with_their_boundaries(path: Path) -> None:
    plan = {"type": "plan", "worker": 0, "at_ps": 10, "decode": True, "joins": [3]}
    journal = read_journal(write(path, HEADER, ATTACHED, plan, STEPS, {"type": "end"}))
    assert journal.complete
    assert journal.cut_line is None
    assert journal.workers[0].expected == [
        ExpectedPlan(3, 10, {"decode": True, "joins": [3]}),
        ExpectedStep(4, 10, 0, 15, 1, {}),
        ExpectedStep(4, 15, 100, 122, 2, {"finished": [[3, "eos", 2]]}),
    ]


def test_a_compressed_journal_is_read_as_it_is(path: Path) -> None:
    plain = read_journal(write(path, HEADER, ATTACHED, STEPS, {"type": "end"}))
    whole = gzip.compress(path.read_bytes())
    path.write_bytes(whole)
    assert read_journal(path) == plain
    path.write_bytes(whole[:-9])
    with pytest.raises(FormatError, match=r"journal.jsonl: cut or damaged gzip"):
        read_journal(path)


def test_two_journals_in_one_file_are_refused(path: Path) -> None:
    for end in ([], [{"type": "end"}]):
        with pytest.raises(FormatError, match=rf":{3 + len(end)}: .* another journal begins here; write each to"):
            read_journal(write(path, HEADER, ATTACHED, *end, HEADER, ATTACHED))


def test_a_last_line_that_is_cut_off_is_left_out_and_told(path: Path) -> None:
    journal = read_journal(write(path, HEADER, ATTACHED, json.dumps(STEPS)[:40]))
    assert journal.cut_line == 3
    assert not journal.complete
    assert journal.workers[0].expected == []


def test_a_stop_knows_how_much_came_before_it(path: Path) -> None:
    lost = {"type": "lost", "worker": 0, "at_ps": 200}
    journal = read_journal(write(path, HEADER, ATTACHED, STEPS, lost))
    assert journal.workers[0].stops == [2]
    assert [line.type for line in journal.inputs] == ["attached", "lost"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("",), "has no header"),
        (('{"format_version"',), "has no header"),
        (("no journal\n",), "is not a journal"),
        (("[1]\n",), "is not a journal"),
        (({**HEADER, "kind": "static_trie"},), "holds 'static_trie', not a journal"),
        (({**HEADER, "format_version": 12},), "format_version 12 is not known; this version reads 1, 2, 3, 4, 5,"),
        ((HEADER, "{}\n"), ":2: is not a line of a journal: KeyError: 'type'"),
        ((HEADER, "{\n", {"type": "end"}), ":2: is not a line of a journal: JSONDecodeError"),
        ((HEADER, {"type": "who"}), ":2: is not a line of a journal: ValueError: no line is a 'who'"),
        ((HEADER, STEPS), ":2: is not a line of a journal: IndexError"),
        ((HEADER, ATTACHED, ATTACHED), ":3: is not a line of a journal: ValueError: worker 0 attached as number 1"),
        ((HEADER, ATTACHED, {**STEPS, "checksums": [1]}), ":3: is not a line of a journal: ValueError"),
        ((HEADER, {"type": "end"}, ATTACHED), ":3: is not a line of a journal: ValueError: the journal had ended"),
    ],
)
def test_what_is_no_journal_is_an_error(path: Path, lines: tuple[dict[str, Any] | str, ...], message: str) -> None:
    with pytest.raises(FormatError) as error:
        read_journal(write(path, *lines))
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_a_file_that_is_not_there_is_an_error(path: Path) -> None:
    with pytest.raises(FormatError, match="No such file"):
        read_journal(path)
