"""What gRPC's C core reads from the environment, and cannot be told otherwise.

* It remarks on others' connections: no line of a log, and no JSON.
* Its connections belong to its event engine, whose poller and thread pool pass each message on between them. The older
  code, in which the thread that waits for what has happened also polls, takes two thirds of the CPU time for a message
  that a server reads and one that it writes (four switches of threads instead of seven), and less than two thirds for
  a message that a client reads (grpcio 1.85, Linux; docs/decisions.md). A version that does not know one of the names
  writes an error to standard error in each process, whatever its verbosity; so they are named only to those that do.
"""

import os
from importlib import metadata

KNOWING = ("1.85",)
"""Versions of grpcio with both experiments. tests/chassis/test_grpc_core.py says whether the installed one has them."""


def variables(version: str | None) -> dict[str, str]:
    """Return what is set for a version of grpcio; None: an unknown one."""
    chosen = {"GRPC_VERBOSITY": "ERROR"}
    if version is not None and ".".join(version.split(".")[:2]) in KNOWING:
        chosen["GRPC_EXPERIMENTS"] = "-event_engine_listener,-event_engine_client"
    return chosen


def installed_version() -> str | None:
    """Return grpcio's version, without an import of it; None: there is no record of its installation."""
    try:
        return metadata.version("grpcio")
    except metadata.PackageNotFoundError:
        return None


def set_up_grpc() -> None:
    """Set what the environment leaves open; call it before gRPC is imported."""
    for name, value in variables(installed_version()).items():
        os.environ.setdefault(name, value)
