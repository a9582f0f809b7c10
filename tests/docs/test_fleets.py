"""Whoever has a wheel and no checkout gets the fleet of deploy/mixed.toml by the lines that docs/fleets.md shows."""

import re
import tomllib
from pathlib import Path

from lorrery.service.files.shipped import DEFAULT_SETTINGS
from lorrery.service.settings.cluster import load

ROOT = Path(__file__).parents[2]


def test_the_lines_of_the_page_behind_the_shipped_settings_are_the_fleet_of_mixed_toml(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "fleets.md").read_text(encoding="utf-8")
    found = re.search(r"append these lines.*?```toml\n(.*?)```", page, re.DOTALL)
    assert found is not None
    own = tmp_path / "cluster.toml"
    own.write_text(DEFAULT_SETTINGS.read_text(encoding="utf-8") + found[1], encoding="utf-8")
    mixed = ROOT / "deploy" / "mixed.toml"
    assert load(own).num_worker_processes(None, 1) == 3
    assert tomllib.loads(own.read_text())["workers"] == tomllib.loads(mixed.read_text())["workers"]
