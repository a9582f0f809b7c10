import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lorrery.service.errors import LorreryError
from lorrery.service.files.writing import temporary_folder

HOLD = """
import sys
from lorrery.service.files.writing import temporary_folder
with temporary_folder("other") as folder:
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_a_folder_goes_with_its_block(tmp_path: Path):
    with temporary_folder("own") as folder:
        assert folder.name.startswith("lorrery-own-")
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("found", [False, True])
def test_a_folder_that_cannot_be_made_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bool):
    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "new"))

    if found:
        monkeypatch.setattr(tempfile, "mkdtemp", no_room)
    else:
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(tempfile, "_get_default_tempdir", no_room)
    with (
        pytest.raises(LorreryError, match=r"^no folder for temporary files: .*No space left on device; let TMPDIR"),
        temporary_folder("own"),
    ):
        pass


def test_what_a_killed_process_has_left_goes_when_the_next_folder_is_made():
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        left = Path(process.stdout.readline().strip())
        with temporary_folder("own"):
            assert (left / "sub" / "file").exists(), "its process lives"
        process.kill()
        process.wait()
        assert (left / "sub" / "file").exists()
        with temporary_folder("own") as folder:
            assert not left.exists()
            assert folder.exists()


def test_what_no_process_of_ours_has_made_stays(tmp_path: Path):
    (tmp_path / "lorrery-notes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".lock").touch()
    (tmp_path / "lorrery-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "lorrery-file").touch()
    before = sorted(tmp_path.rglob("*"))
    with temporary_folder("own"):
        pass
    assert sorted(tmp_path.rglob("*")) == before
