"""Every study is one command that writes small figures and a table, and a page of docs shows it."""

import csv
import importlib
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from lab.studies import __main__ as studies
from lorrery.view import plots

ROOT = Path(__file__).parents[3]
SMALL = {
    "llm_mock": ["--draws", "2", "--corpus", "100"],
    "batch_sizes": ["--largest", "4"],
    "static_continuous": [],
    "long_tail": [],
    "adapters": ["--duration", "2"],
    "fair_tenants": ["--seconds", "6"],
    "mixed_fleet": ["--seconds", "6"],
    "shards": ["--seconds", "2", "--seeds", "1"],
    "affinity": ["--requests", "20", "--placements", "weighted"],
    "referee": ["--virtual", "2", "--seconds", "2"],
    "intervals": ["--seeds", "6", "--seconds", "2"],
    "autoscaling": ["--seconds", "30"],
}


@pytest.mark.parametrize("name", studies.STUDIES)
def test_a_study_writes_its_figures_and_its_table(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captions: list[str] = []

    def save(figure: Figure, path: Path, caption: str) -> Path:
        for axes in figure.axes:
            for label in (axes.get_xlabel(), axes.get_ylabel() or "number"):  # of bars with names the place says it
                assert re.search(r"\(.+\)|%|number", label), f"{path.name}: axis {label!r} has no unit"
        captions.append(caption)
        return saved(figure, path, caption)

    saved = plots.save
    monkeypatch.setattr(plots, "save", save)
    importlib.import_module(f"lab.studies.{name}").main([*SMALL[name], "--out", str(tmp_path)])
    with (tmp_path / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert all(None not in row and None not in row.values() for row in rows)
    assert all(re.search(r"Llama|names neither model nor GPU", caption) for caption in captions)
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn
    assert [path.stem for path in sorted(tmp_path.glob("*.svg"))] == [Path(name).stem for name in drawn]
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    for figure in drawn:
        assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")
        assert f"(figures/{figure})" in text
        assert (ROOT / "docs" / "figures" / figure).stat().st_size < 150_000
    assert f"python -m lab.studies.{name}" in text


def test_without_a_name_the_studies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    studies.main([])
    listed = capsys.readouterr().out
    assert all(f"python -m lab.studies.{name}" in listed for name in studies.STUDIES)


def test_a_name_that_is_no_study_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        studies.main(["nonsense"])
    assert "no study 'nonsense'" in capsys.readouterr().err
