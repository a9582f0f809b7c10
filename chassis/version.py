"""The version of this tree.

An installed package knows it from its metadata. A source tree that was never installed (a container that copies the
folders, a checkout) reads its own pyproject.toml, so that the number is written in one place only.
"""

import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


def _read() -> str:
    try:
        return metadata.version("lorrery")
    except metadata.PackageNotFoundError:
        pass
    try:
        with (Path(__file__).resolve().parent.parent / "pyproject.toml").open("rb") as file:
            return str(tomllib.load(file)["project"]["version"])
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return "unknown"


VERSION = _read()


def core_is_compiled() -> bool:
    """Tell whether what `hatch_build.py` compiles runs from C here, not from its Python files."""
    spec = find_spec("lorrery.scheduler.core.replica")
    assert spec is not None
    assert spec.origin is not None
    return not spec.origin.endswith(".py")
