"""Files that ship with the program."""

from pathlib import Path

DEFAULT_SETTINGS = Path(__file__).resolve().parent.parent / "deploy" / "cluster.toml"
"""The cluster that commands describe, start or simulate unless told otherwise."""
