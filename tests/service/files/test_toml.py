"""Tables written as TOML are read as the same tables."""

import tomllib
from datetime import UTC, date, datetime, time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorrery.service.errors import SettingsError
from lorrery.service.files.reading import dotted, parse_toml, read_toml, to_toml, to_value
from lorrery.service.settings.reading import leaves

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT | st.dates() | st.times()
    | st.datetimes(timezones=st.none() | st.just(UTC)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=40)
@given(tables=st.dictionaries(TEXT, VALUES, max_size=3))
def test_any_tables_are_read_back(tables: dict[str, object]):
    assert tomllib.loads("".join(f"{dotted(key)} = {to_value(value)}\n" for key, value in leaves(tables))) == tables
    assert tomllib.loads(f"all = {to_value(tables)}") == {"all": tables}
    assert tomllib.loads(to_toml(tables)) == tables


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("inf"), "inf"), (float("-inf"), "-inf"), (float("nan"), "nan"), ({}, "{}"), ([], "[]"),
        (date(2026, 1, 2), "2026-01-02"), (time(1, 2, 3), "01:02:03"),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
        ({"a b": 1, "c": None}, '{ "a b" = 1 }'),
    ],
)  # fmt: skip
def test_a_value_is_written_as_toml_has_it(value: object, written: str):
    assert to_value(value) == written


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a" + ".a" * 99 + " = 1", None),
        ("x = '" + "a." * 100_000 + "'", "a." * 100_000),
        ("x = '" + "{a ." * 100_000 + "'", "{a ." * 100_000),
        ("x = '''\n" + ",   a" * 100_000 + "'''", ",   a" * 100_000),
        ("# " + ", a.a " * 100_000, None),
        ("x = [" + "1.5, " * 10_000 + "]", [1.5] * 10_000),
        ("x = '" + "a" * 1_000_000 + "'", "a" * 1_000_000),
    ],
    ids=["key", "text", "braces in text", "commas in text", "comment", "array", "word"],
)
def test_what_is_long_but_no_long_key_is_read(text: str, value: object):
    assert parse_toml(text).get("x") == value


def test_a_byte_order_mark_is_passed_over(tmp_path: Path):
    path = tmp_path / "cluster.toml"
    path.write_bytes(b"\xef\xbb\xbfa = 1")
    assert read_toml(path) == {"a": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = '\xff'", "byte 0xff at 5 is no UTF-8; save it as UTF-8 text"),
        (b"a = " + b"[" * 50_000, "it is nested too deeply; give fewer levels"),
        (b"a = " + b"9" * 5_000, "it has a number of too many digits; give a shorter one"),
        (b"a." * 100_000 + b"a = 1", "it has a key of more than 100 parts; give a shorter one"),
        (b"[" + b"'a' . " * 100_000 + b"a]", "it has a key of more than 100 parts"),
        (b'a = { "\\"" ' + b'."x y"' * 100_000 + b" = 1 }", "it has a key of more than 100 parts"),
        (b"a", "Expected '=' after a key"),
    ],
    ids=["bytes", "levels", "digits", "parts", "parts of a table's name", "parts in braces", "no table"],
)
def test_a_file_that_is_no_toml_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "cluster.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        read_toml(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)
