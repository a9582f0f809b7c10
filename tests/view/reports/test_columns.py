import csv
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorrery.service.errors import FormatError
from lorrery.view.reports import columns
from lorrery.view.reports.columns import read_header, read_rows

TEXT = st.text(alphabet='ab7é, "\n', max_size=12)
NUMBER = st.one_of(
    st.just(""),
    st.floats(0, 1e9).map(lambda value: f"{value:.6f}"),
    st.integers(0, 10**15).map(str),
    st.sampled_from(["-1.5", "nan", "1e3", "0", "000.5", ".5", "7."]),
)


def read(path, num_columns=2):
    cut = []
    with path.open("rb") as file:
        header = read_header(file, path)
        rows = list(read_rows(file, path, len(header), cut))
    known = {}
    numbers = np.concatenate([one.floats(1) for one in rows]) if rows else np.empty(0)
    codes = np.concatenate([one.codes(0, known) for one in rows]) if rows else []
    return [list(known)[code] for code in codes], numbers, cut


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(TEXT, NUMBER), max_size=30), st.sampled_from([7, 64, 4096]))
def test_columns_are_what_csv_reads(tmp_path_factory, rows, piece):
    path = tmp_path_factory.mktemp("csv") / "requests.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("name", "number"), *rows])
    whole, columns.PIECE_BYTES = columns.PIECE_BYTES, piece
    try:
        names, numbers, cut = read(path)
    finally:
        columns.PIECE_BYTES = whole
    expected = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8"), newline="")))[1:]
    assert names == [name for name, _ in expected]
    np.testing.assert_array_equal(numbers, [float(number) if number else np.nan for _, number in expected])
    assert cut == []


def test_a_line_cut_short_is_left_out_and_told(tmp_path):
    path = tmp_path / "requests.csv"
    path.write_text("name,number\na,1\nb")
    names, numbers, cut = read(path)
    assert (names, numbers.tolist()) == (["a"], [1.0])
    assert "in the middle of line 3" in cut[0]


@pytest.mark.parametrize(("line", "message"), [("a,x7", "line 3: 'x7' is not a number"), ("a,1,2", "line 3 has 3")])
def test_what_is_no_number_and_what_does_not_fit_the_header_is_named(tmp_path, line, message):
    path = tmp_path / "requests.csv"
    path.write_text(f"name,number\na,1\n{line}\n")
    with pytest.raises(FormatError, match=message):
        read(path)


def test_long_names_and_windows_line_ends(tmp_path):
    path = tmp_path / "requests.csv"
    path.write_bytes(b"name,number\r\n" + b"a" * 300 + b",1.5\r\n" + b"b" * 299 + b",2\r\n")
    names, numbers, _ = read(path)
    assert names == ["a" * 300, "b" * 299]
    assert numbers.tolist() == [1.5, 2.0]
