"""What all plots share: a caption, formats by the file's ending, the same bytes each time, a look of their own."""

import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import pytest

from lorrery.service.errors import LorreryError, SettingsError
from lorrery.view import plots

CAPTION = "Llama-3-8B on one H100-SXM, 2 requests/s. " + "A caption may be longer than its line is. " * 5


def plot(path: Path) -> bytes:
    with plots.drawing("this test"):
        figure, (axes,) = plots.canvas(1, 1, 3.0)
        for index in range(3):
            look = plots.series(index)
            axes.plot([1, 2], [index, 2], color=look.colour, marker=look.marker, label=f"line {index}")
            axes.bar([index], [1], hatch=look.hatch)
        plots.legend_above(figure, axes, columns=3)
        return plots.save(figure, path, CAPTION).read_bytes()


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_ending_says_the_format_and_the_bytes_are_the_same_each_time(
    suffix: str, start: bytes, tmp_path: Path
) -> None:
    drawn = plot(tmp_path / f"first{suffix}")
    assert drawn.startswith(start)
    assert drawn == plot(tmp_path / f"second{suffix}")


def test_the_callers_own_style_neither_shows_nor_changes(tmp_path: Path) -> None:
    drawn = plot(tmp_path / "plot.svg")
    with mpl.style.context("dark_background"):
        before = dict(mpl.rcParams)
        assert plot(tmp_path / "dark.svg") == drawn
        assert dict(mpl.rcParams) == before


def test_a_caption_is_text_and_wrapped(tmp_path: Path) -> None:
    drawn = plot(tmp_path / "plot.svg").decode()
    assert "Llama-3-8B on one H100-SXM, 2 requests/s." in drawn
    assert CAPTION not in drawn


def test_seven_series_differ_in_colour_marker_and_hatch_and_many_more_in_one_of_them() -> None:
    seven = [plots.series(index) for index in range(7)]
    for values in zip(*((look.colour, look.marker, look.hatch) for look in seven), strict=True):
        assert len(set(values)) == 7
    assert len({plots.series(index) for index in range(49)}) == 49


def test_a_name_with_another_ending_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"--plot a\.gif: the name must end in \.svg, \.png, \.pdf"):
        plots.check("--plot", Path("a.gif"))


def test_without_matplotlib_the_error_has_the_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(LorreryError, match=r"this test needs the extra plot: pip install 'lorrery\[plot\]'"):
        plot(tmp_path / "plot.svg")
    with pytest.raises(LorreryError, match=r"--plot needs the extra plot"):
        plots.check("--plot", Path("a.svg"))


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LorreryError, match="No such file or directory"):
        plot(tmp_path / "nowhere" / "plot.svg")


def test_matplotlib_is_imported_only_when_something_is_drawn() -> None:
    importing = "import lorrery.cli.plan, lorrery.simulator.sweep.plot, lab.studies.adapters, sys"
    code = f"{importing}; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
