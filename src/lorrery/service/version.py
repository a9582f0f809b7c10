"""The version of the installed package, and whether its core is compiled."""

from importlib.util import find_spec

VERSION = "0.1.0"
"""As in pyproject.toml: reading it from the installed package takes longer than reading a settings file."""


def core_is_compiled() -> bool:
    """Return whether the modules that `hatch_build.py` compiles are loaded as C extensions."""
    spec = find_spec("lorrery.scheduler.core.replica")
    assert spec is not None
    assert spec.origin is not None
    return not spec.origin.endswith(".py")
