"""Take the pictures of the documentation again: `make screenshots`, or `python -m lab.screenshots [NAME...]`.

A picture has a module here with `take(folder)`, which starts what it shows, writes PNGs and returns their paths, and a
line in PICTURES.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from lab.screenshots import orrery, report

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
MOST_KB = 400
"""Of one picture: the repository keeps every version."""

PICTURES: dict[str, Callable[[Path], list[Path]]] = {
    "orrery": orrery.take,
    "report": report.take,
}


def main() -> None:
    """Take those that the command line names, or all."""
    unknown = set(sys.argv[1:]) - PICTURES.keys()
    if unknown:
        sys.exit(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    for name in sys.argv[1:] or PICTURES:
        for path in PICTURES[name](FIGURES):
            size = path.stat().st_size / 1000
            print(f"{path.relative_to(FIGURES.parents[1])}  {size:.0f} KB")
            if size > MOST_KB:
                sys.exit(f"{path} has more than {MOST_KB} KB")


main()
