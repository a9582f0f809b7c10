"""The file of loads and unloads: a change adds a line, and whatever becomes of the file, it is read as it was kept."""

import asyncio
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lorrery.scheduler.adapters as module
from lorrery.scheduler.adapters import AdaptersFile, LoadedAdapters
from lorrery.service.errors import FormatError, LorreryError
from lorrery.service.settings.cluster import load
from lorrery.vocabulary.adapters import AdapterChange, AdapterLog

CHANGES = st.lists(
    st.builds(AdapterChange, st.integers(1, 30), st.sampled_from("abcde"), st.sampled_from([0, 0, 8])), max_size=4
)
BATCHES = st.lists(CHANGES, max_size=4)
ROUNDS = st.lists(st.tuples(BATCHES, st.sampled_from(["", "", "start anew", "cut", "remove"])), max_size=12)
MAX_UNLOADS = 2


def new_log() -> AdapterLog:
    return AdapterLog(["a"], max_unloads=MAX_UNLOADS)


def read_log(path: Path) -> AdapterLog:
    """The log that a file holds; with it the file is read as by a scheduler that starts."""
    log, kept = new_log(), AdaptersFile(path).read()
    assert kept is not None
    log.merge_all(kept.changes, kept.forgotten)
    for changes in kept.added:
        log.merge(changes)
    return log


def loaded(path: Path) -> LoadedAdapters:
    return LoadedAdapters(load(None, [f"scheduler.adapters_file='{path}'"]))


def load_one(adapters: LoadedAdapters, adapter_id: str, rank: int) -> None:
    change = adapters.check(adapter_id, rank)
    assert change is not None
    adapters.merge([change])


def known(path: Path) -> list[str]:
    """Adapters that a scheduler with this file knows when it starts."""
    return [change.adapter_id for change in loaded(path).log.changes if change.rank]


@given(ROUNDS)
def test_what_is_read_is_the_log_as_it_was_at_the_last_write(
    rounds: list[tuple[list[list[AdapterChange]], str]],
) -> None:
    log = new_log()
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FEW", 4)
        patch.setattr(os, "fsync", lambda _: None)
        path = Path(folder, "adapters")
        file = AdaptersFile(path)
        for batches, happens in rounds:
            added = [news for changes in batches if (news := log.merge(changes))]
            if not file.append(added, log.num_changes):
                file.replace(log.changes, log.forgotten)
            read = read_log(path)
            assert (read.changes, read.forgotten) == (log.changes, log.forgotten)
            if happens == "start anew":
                file = AdaptersFile(path)
                file.read()
            elif happens == "cut":  # a process that was killed as it wrote the next line
                with path.open("ab") as half:
                    half.write(b'[[99,"a"')
                assert read_log(path).changes == log.changes
            elif happens == "remove":
                path.unlink()


async def test_a_change_adds_a_line_until_there_are_more_than_the_log_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEW", 3)
    path = tmp_path / "adapters"
    adapters = loaded(path)
    lines = []
    for number in range(10):
        if number % 2:
            adapters.unload("x")
        else:
            load_one(adapters, "x", 8)
        await adapters.save()
        lines.append(path.read_text().count("\n"))
    assert lines == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    for number in range(10):
        load_one(adapters, f"y{number}", 8)
        await adapters.save()
    assert path.read_text().count("\n") == 12  # the log has 11, so they may be as many
    assert known(path) == [f"y{number}" for number in range(10)]


async def test_a_file_that_is_cut_within_a_line_loses_that_line_alone_and_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "adapters"
    adapters = loaded(path)
    for name in "xyz":
        load_one(adapters, name, 8)
        await adapters.save()
    path.write_bytes(path.read_bytes()[:-3])
    assert known(path) == ["x", "y"]
    again = loaded(path)
    load_one(again, "w", 8)
    await again.save()
    assert known(path) == ["x", "y", "w"]
    assert path.read_text().count("\n") == 1


async def test_a_file_of_version_1_is_read_and_written_anew_with_the_next_change(tmp_path: Path) -> None:
    path = tmp_path / "adapters"
    record = {"kind": "adapters", "format_version": 1, "forgotten": 9, "changes": [[12, "x", 8]]}
    path.write_text(json.dumps(record, indent=1))  # as somebody's tool may have written it
    adapters = loaded(path)
    load_one(adapters, "y", 8)
    await adapters.save()
    assert json.loads(path.read_text())["format_version"] == 2
    assert known(path) == ["x", "y"]


async def test_a_file_that_somebody_replaced_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "adapters"
    adapters = loaded(path)
    load_one(adapters, "x", 8)
    await adapters.save()
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    other.replace(path)
    load_one(adapters, "y", 8)
    await adapters.save()
    assert path.read_text().count("\n") == 1
    assert known(path) == ["x", "y"]


async def test_after_a_disk_that_failed_the_next_change_writes_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "adapters"
    adapters = loaded(path)
    load_one(adapters, "x", 8)
    await adapters.save()
    with monkeypatch.context() as patch:

        def fail(_: int) -> None:
            raise OSError(5, "Input/output error")

        patch.setattr(os, "fsync", fail)
        load_one(adapters, "y", 8)
        await adapters.save()
    load_one(adapters, "z", 8)
    await adapters.save()
    assert known(path) == ["x", "y", "z"]
    assert path.read_text().count("\n") == 1


async def test_a_call_that_is_cancelled_as_its_change_is_written_costs_no_change(tmp_path: Path) -> None:
    path = tmp_path / "adapters"
    adapters = loaded(path)
    for number in range(8):
        load_one(adapters, f"x{number}", 8)
        saving = asyncio.create_task(adapters.save())
        await asyncio.sleep(0)
        if number % 2:
            saving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await saving
    await adapters.save()
    assert known(path) == [f"x{number}" for number in range(8)]


@pytest.mark.parametrize(
    "content",
    [
        '{"kind":"adapters","format_version":2,"forgotten":0,"changes":[]} [[1,"x",8]]\n',
        '{"kind":"adapters","format_version":2,"forgotten":0,"changes":[]}\n[[1,"x"]]\n',
        '{"kind":"adapters","format_version":2,"forgotten":0,"changes":[]}\nnothing\n[[1,"x",8]]\n',
        '{"kind":"adapters","format_version":2,"forgotten":0,"changes":[["1","x",8]]}\n',
        '{"kind":"adapters","format_version":3,"forgotten":0,"changes":[]}\n',
    ],
)
def test_a_file_with_lines_of_something_else_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "adapters"
    path.write_text(content)
    with pytest.raises(FormatError, match=f"scheduler.adapters_file: {path}: "):
        loaded(path)


def test_a_folder_that_does_not_exist_is_told_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "no" / "kept"
    with pytest.raises(LorreryError, match=f"adapters_file: {path}: there is no folder {path.parent}; create it, or"):
        loaded(path)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(FormatError, match=f"scheduler.adapters_file: {path}: is not a regular file"):
            loaded(path)
    assert loaded(tmp_path / "new").log.changes == []
