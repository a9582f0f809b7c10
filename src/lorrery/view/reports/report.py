"""`lorrery report` as a function: reads folders, renders the page, writes it."""

from collections.abc import Sequence
from pathlib import Path

from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.files.writing import write_whole
from lorrery.vocabulary.files import REPORT_FILE

__all__ = ["report", "write_page"]


def report(*folders: str | Path, file: str | Path | None = None) -> Path:
    """Make one page of runs and sweeps, as `lorrery report` does; return its path.

    Args:
        folders: written by `lorrery load --out`, `lorrery simulate --out` or `SimulationResult.write`. The first run is
            the baseline for comparisons.
        file: of the page; None: `report.html`, in the folder if there is one only, else in the current folder.

    Raises:
        LorreryError: no such run, or files that cannot be read or written; says what to do.
    """
    for given in folders if file is None else (*folders, file):
        if not isinstance(given, str | Path) or "\0" in str(given):
            raise SettingsError(f"{given!r} is not a path: give text or a Path")
    paths = [Path(folder) for folder in folders]
    for path in paths if file is None else (*paths, Path(file)):
        try:
            path.exists()
        except OSError as error:  # a name that no file can have
            raise SettingsError(f"{path}: {error.strerror}") from None
    if not paths:
        raise SettingsError("name a folder that `lorrery load --out` or `lorrery simulate --out` has written")
    if file is not None:
        target = Path(file)
    elif len(paths) == 1:
        target = (paths[0] if paths[0].is_dir() else paths[0].parent) / REPORT_FILE
    else:
        target = Path(REPORT_FILE)
    write_page(paths, target)
    return target


def write_page(folders: Sequence[Path], target: Path) -> None:
    """Write the page of some folders.

    Raises:
        LorreryError: as `report`.
    """
    from lorrery.view.reports.page import render
    from lorrery.view.reports.read import read_folders

    if target.is_dir():
        raise SettingsError(f"{target} is a folder; name the page's file, such as {target / REPORT_FILE}")
    runs, sweeps = read_folders(list(folders))
    content = render(runs, sweeps)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, content.encode(errors="replace"))
    except OSError as error:
        raise LorreryError(f"{target}: {error.strerror}") from None
