"""What is installed: the version of the package, whether its core is compiled, and which extras it has.

An extra brings optional libraries, which are imported only where they are used. `lorrery[all]` brings those that
services and commands use; `dask`, `parquet` and `ray`, which are large, are installed by name.
"""

from collections.abc import Mapping
from importlib.util import find_spec

from lorrery.service.errors import SettingsError

VERSION = "0.1.0"
"""As in pyproject.toml: reading it from the installed package takes longer than reading a settings file."""


def core_is_compiled() -> bool:
    """Return whether the modules that `hatch_build.py` compiles are loaded as C extensions."""
    spec = find_spec("lorrery.scheduler.core.replica")
    assert spec is not None
    assert spec.origin is not None
    return not spec.origin.endswith(".py")


EXTRAS: Mapping[str, tuple[str, ...]] = {
    "certs": ("cryptography",),
    "dask": ("distributed", "joblib"),
    "dns": ("dns",),
    "engines": ("smg_grpc_proto",),
    "fast": ("uvloop",),
    "kv-events": ("msgspec", "zmq"),
    "parquet": ("pyarrow",),
    "plot": ("matplotlib",),
    "ray": ("joblib", "ray"),
    "reflection": ("grpc_reflection",),
    "titles": ("setproctitle",),
    "tracing": ("opentelemetry.sdk", "opentelemetry.exporter.otlp"),
}
"""Extra -> the modules that it brings."""


def has_extra(extra: str) -> bool:
    """Return whether an extra is installed; its modules are not imported."""
    return all(_is_there(module) for module in EXTRAS[extra])


def need_extra(extra: str, what: str) -> None:
    """Check that an extra is installed.

    Args:
        extra: its name.
        what: needs it: a setting and its value, an option, a command.

    Raises:
        SettingsError: it is not.
    """
    if not has_extra(extra):
        raise SettingsError(missing_extra(extra, what))


def missing_extra(extra: str, what: str) -> str:
    """Return the text about a missing extra; for the arguments see `need_extra`."""
    return f"{what} needs the extra {extra}: pip install 'lorrery[{extra}]'"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a package above it is missing, or has been barred from being imported
        return False
