"""Settings of gRPC's C core that can only be made through the environment.

* Its verbosity: it logs remarks about others' connections, not as log events or JSON.
* Its event engine, whose poller and thread pool hand each message over between them. The older code, in which the
  thread that waits for events also polls, takes two thirds of the CPU time for a message that a server reads and one
  that it writes (four thread switches instead of seven), and less than two thirds for a message that a client reads
  (grpcio 1.85, Linux; docs/decisions.md). A version that does not know one of the experiments writes an error to
  standard error in each process, whatever its verbosity; so they are set only for versions that do.
"""

import os
from importlib import metadata

KNOWING = ("1.85",)
"""Versions of grpcio with both experiments, and the methods that the server replaces. Tests check the installed
one (tests/service/network/test_grpc_core.py, test_server.py)."""


def is_known(version: str | None) -> bool:
    """Return whether a version is one of `KNOWING`; None: unknown."""
    return version is not None and ".".join(version.split(".")[:2]) in KNOWING


def variables(version: str | None) -> dict[str, str]:
    """Return the variables to set for a version of grpcio; None: unknown."""
    chosen = {"GRPC_VERBOSITY": "ERROR"}
    if is_known(version):
        chosen["GRPC_EXPERIMENTS"] = "-event_engine_listener,-event_engine_client"
    return chosen


def installed_version() -> str | None:
    """Return grpcio's version without importing it; None: no installation record."""
    try:
        return metadata.version("grpcio")
    except metadata.PackageNotFoundError:
        return None


def set_up_grpc() -> None:
    """Set the variables that the environment lacks; call this before gRPC is imported."""
    for name, value in variables(installed_version()).items():
        os.environ.setdefault(name, value)
