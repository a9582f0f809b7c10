"""gRPC is set up as the installed version allows: an experiment that it does not know is an error on stderr."""

import asyncio
import sys

import pytest

from lorrery.service import entry_point
from lorrery.service.local.processes import start_python

USES_GRPC = """
import sys
from lorrery.service.entry_point import set_up_grpc
set_up_grpc()
assert "grpc" not in sys.modules
import os, grpc
grpc.insecure_channel("127.0.0.1:1").close()
print(os.environ.get("GRPC_EXPERIMENTS"))
"""


async def said(experiments: str | None) -> tuple[str, str]:
    """Return what a process that uses gRPC has as its experiments, and all that it writes to standard error."""
    variables = {} if experiments is None else {"GRPC_EXPERIMENTS": experiments}
    pipe = asyncio.subprocess.PIPE
    process = await start_python(["-c", USES_GRPC], stdout=pipe, stderr=pipe, variables=variables)
    out, error = await process.communicate()
    return out.decode().strip(), error.decode()


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch):
    for name in entry_point.grpc_variables(None):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)


async def test_the_installed_grpc_knows_the_experiments_and_writes_nothing():
    experiments, error = await said(None)
    assert error == ""
    # None: gRPC is newer than KNOWN_GRPCIO. Add it there if it has both names; without them a message costs more.
    assert experiments == "-event_engine_listener,-event_engine_client"


async def test_an_experiment_that_the_environment_names_is_left_alone_and_an_unknown_one_is_an_error():
    experiments, error = await said("no_such_thing")
    assert experiments == "no_such_thing"
    assert "Unknown experiment: no_such_thing" in error


@pytest.mark.parametrize("version", [None, "1.86.0", "1.850.0", "2.85.0", "1.84.2"])
def test_experiments_are_not_named_to_a_version_that_may_not_know_them(version: str | None):
    assert entry_point.grpc_variables(version) == {"GRPC_VERBOSITY": "ERROR"}


def test_an_installation_without_a_record_counts_as_an_unknown_version(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [])
    assert entry_point.grpcio_version() is None
