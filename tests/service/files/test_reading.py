"""Whatever is wrong with a CSV file is said in one line that begins with its path."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from lorrery.service.errors import FormatError, LorreryError, SettingsError
from lorrery.service.files.reading import open_csv
from lorrery.validation import steptime, vidur
from lorrery.worker.build import read_profile_file, read_steps_file


def test_rows_are_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig"):
        path = tmp_path / encoding
        path.write_text("a,b\n1,2\n", encoding=encoding)
        with open_csv(path, FormatError, ValueError) as file:
            assert list(csv.DictReader(file)) == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize("read", [read_profile_file, read_steps_file, steptime.read_file, vidur.read_requests])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n\xff,1\n", ": no UTF-8 text (invalid start byte); a CSV file is needed"),
        (b'"' + b"x" * 200_000, ": no CSV (field larger than field limit (131072)); save it as CSV"),
        (None, ": No such file or directory"),
    ],
)
def test_a_file_that_is_no_csv_is_refused(
    read: Callable[[Path], object], content: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    if content is not None:
        header = b"phase,step_ms,prefill_tokens,decode_seqs\n" if read is not vidur.read_requests else b""
        path.write_bytes(header + content)
    with pytest.raises(LorreryError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}{message}")


def test_a_row_that_cannot_be_is_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a\nx\n")
    with pytest.raises(SettingsError, match=r"rows\.csv: line 2: no number"), open_csv(path, SettingsError, ValueError):
        raise ValueError("line 2: no number")
