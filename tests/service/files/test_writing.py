import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorrery.service.errors import SettingsError
from lorrery.service.files.writing import check_writable, whole_file, write_whole


def test_a_file_is_replaced_as_a_whole_and_nothing_stays_beside_it(tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        with whole_file(path) as file:
            file.write(b"new")
            file.flush()
            assert path.read_bytes() == b"old"
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_fails_leaves_the_old_file_alone(tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), whole_file(path) as file:
        file.write(b"ne" * (1 // 0))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_named_pipe_is_written_to_and_stays_one(tmp_path: Path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as pool:
        content = pool.submit(path.read_bytes)
        write_whole(path, b"through")
        assert content.result(60) == b"through"
    assert stat.S_ISFIFO(path.lstat().st_mode)


@pytest.mark.parametrize("there", [True, False], ids=["there", "dangling"])
def test_a_link_stays_and_its_target_gets_the_content(tmp_path: Path, there: bool):
    target, link = tmp_path / "elsewhere" / "page.html", tmp_path / "link.html"
    target.parent.mkdir()
    if there:
        target.write_bytes(b"old")
    link.symlink_to(target)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert list(target.parent.iterdir()) == [target]


def test_a_link_to_a_pipe_is_written_through(tmp_path: Path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    with ThreadPoolExecutor(1) as pool:
        content = pool.submit(pipe.read_bytes)
        write_whole(link, b"through")
        assert content.result(60) == b"through"
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert link.is_symlink()


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_a_file_that_is_standard_output_is_written_to_where_it_stands(tmp_path: Path, name: str, mode: str):
    (tmp_path / "link").symlink_to("/dev/stdout")
    file = tmp_path / "file"
    file.write_text("before\n")
    inode = file.stat().st_ino
    code = (
        "import os, sys; from pathlib import Path; from lorrery.service.files.writing import write_whole;"
        "print('first', flush=True); write_whole(Path(sys.argv[1]), b'second\\n'); os.write(1, b'third\\n')"
    )
    with file.open(mode) as output:
        subprocess.run([sys.executable, "-c", code, tmp_path / name], stdout=output, check=True)
    assert file.read_text() == ("before\n" if mode == "ab" else "") + "first\nsecond\nthird\n"
    assert file.stat().st_ino == inode
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


def test_a_closed_descriptor_is_an_error_of_the_system(tmp_path: Path):
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_whole(Path("/dev/fd/999"), b"x")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "that is a folder"),
        ("none/page.html", "that is in .*/none, which is no folder"),
        ("link", "that is in .*/none, which is no folder"),
        ("file/page.html", "that is in .*/file, which is no folder"),
        ("n" * 256, "File name too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_known_before(tmp_path: Path, name: str, why: str):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "none/page.html")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SettingsError, match=f"^--json .*: {why}"):
        check_writable("--json", tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_cannot_be_written_to_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda *_arguments: False)  # root may write anywhere
    with pytest.raises(SettingsError, match=f"^--json .*: {tmp_path} cannot be written to; name a file in an existing"):
        check_writable("--json", tmp_path / "page.html")


def test_what_can_be_written_passes_and_stays_as_it_is(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "to-be-made")
    (tmp_path / "old").write_bytes(b"old")
    for path in (Path("/dev/null"), Path("/dev/stdout"), *(tmp_path / name for name in ("pipe", "link", "old", "new"))):
        check_writable("--json", path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old", "pipe"]
