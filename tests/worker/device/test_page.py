"""docs/step-time.md lists the constants that are used."""

import re
from pathlib import Path

import pytest

from lorrery.worker.device.hardware import KernelFit
from tests.worker.device.known import CATALOGUE

PAGE = (Path(__file__).parents[3] / "docs" / "step-time.md").read_text(encoding="utf-8")


def table_of(part: str) -> list[dict[str, str]]:
    """The table of products, of attention or of experts, by type."""
    first = {"gemm": ("flops", "bandwidth", "us", "tile"), "attention": ("decode_bandwidth",)}
    return table("fit", "type", *first.get(part, ("flops", "bandwidth", "us", "expert_rows")))


def table(*first_columns: str) -> list[dict[str, str]]:
    lines, header = PAGE.splitlines(), f"| {' | '.join(first_columns)} |"
    start = next(index for index, line in enumerate(lines) if line.startswith(header))
    columns, rows = [cell.strip() for cell in lines[start].strip("|").split("|")], []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(columns, (cell.strip() for cell in line.strip("|").split("|")), strict=True)))
    return rows


def test_every_older_fit_is_listed_with_its_constants():
    rows = table("fit")
    older = {name: fit for name, fit in CATALOGUE.fits.items() if len(fit.gemm) == 1 and not overlaps(fit)}
    assert [row["fit"] for row in rows] == list(older)
    for row in rows:
        constants = older[row.pop("fit")].constants
        assert {name: float(value) for name, value in row.items()} == {name: constants[name] for name in row}


def overlaps(fit: KernelFit) -> bool:
    return bool(fit.attention_of("bf16").overlap)


@pytest.mark.parametrize("part", ["gemm", "attention", "moe"])
def test_every_modern_fit_is_listed_with_its_constants_by_type(part):
    rows = {(row.pop("fit"), row.pop("type")): row for row in table_of(part)}
    known = {
        (name, type_): constants
        for name, fit in CATALOGUE.fits.items()
        if overlaps(fit)
        for type_, constants in getattr(fit, part).items()
    }
    assert list(rows) == list(known)
    for key, row in rows.items():
        figures = {name: float(value) for name, value in row.items()}
        assert figures == {name: getattr(known[key], name) for name in row}


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
