"""The version of the installed package, and whether its core is compiled."""

from importlib.util import find_spec

VERSION = "0.1.0"
"""As in pyproject.toml: asking the installed package for it takes longer than reading a settings file."""


def core_is_compiled() -> bool:
    """Tell whether what `hatch_build.py` compiles runs from C here, not from its Python files."""
    spec = find_spec("lorrery.scheduler.core.replica")
    assert spec is not None
    assert spec.origin is not None
    return not spec.origin.endswith(".py")
