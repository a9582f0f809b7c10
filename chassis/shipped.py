"""The settings file that ships with the program: the cluster that runs where nobody names another."""

from pathlib import Path

_CONFIG = Path(__file__).resolve().parent.parent / "deploy" / "cluster.toml"


def default_config() -> Path | None:
    """Return the source tree's settings file, or None in an installation without one."""
    return _CONFIG if _CONFIG.exists() else None
