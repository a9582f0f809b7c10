"""docs/step-time.md lists the constants that are used."""

import re
from pathlib import Path

import pytest

from tests.worker.device.known import CATALOGUE

PAGE = (Path(__file__).parents[3] / "docs" / "step-time.md").read_text(encoding="utf-8")


def table(first_column: str) -> list[dict[str, str]]:
    lines = PAGE.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    columns, rows = [cell.strip() for cell in lines[start].strip("|").split("|")], []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(columns, (cell.strip() for cell in line.strip("|").split("|")), strict=True)))
    return rows


def test_every_fit_is_listed_with_its_constants():
    rows = table("fit")
    assert [row["fit"] for row in rows] == list(CATALOGUE.fits)
    for row in rows:
        fit = CATALOGUE.fits[row.pop("fit")]
        assert {name: float(value) for name, value in row.items()} == {name: getattr(fit, name) for name in row}


def test_every_engine_is_listed_with_its_constants():
    rows = table("engine")
    assert [row["engine"] for row in rows] == list(CATALOGUE.engines)
    for row in rows:
        engine = CATALOGUE.engines[row.pop("engine")]
        assert row.pop("origin")
        assert {name: float(value) for name, value in row.items()} == {name: getattr(engine, name) for name in row}


@pytest.mark.parametrize(("what", "known"), [("models", CATALOGUE.models), ("GPUs", CATALOGUE.gpus)])
def test_counts_are_right(what, known):
    (count,) = re.findall(rf"has (\d+) {what}|toml` (\d+) {what}", PAGE)
    assert int("".join(count)) == len(known)
