import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorrery.chassis.whole_file import whole_file, write_whole


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
        "import os, sys; from pathlib import Path; from lorrery.chassis.whole_file import write_whole;"
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
