import asyncio
import json
import sys
import types

import pytest
import typer
from typer.testing import CliRunner

from lorrery.cli import app as command
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.installed import VERSION, core_is_compiled
from lorrery.service.local.processes import start_python


async def run(*arguments: str) -> tuple[int | None, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await start_python(arguments, stdout=pipe, stderr=pipe)
    out, error = await process.communicate()
    return process.returncode, out.decode(), error.decode()


async def test_version_says_whether_the_core_is_compiled():
    core = "compiled" if core_is_compiled() else "interpreted"
    assert await run("-m", "lorrery.cli", "--version") == (0, f"lorrery {VERSION}, {core} core\n", "")


async def test_help_lists_every_part():
    code, out, _ = await run("-m", "lorrery.cli", "--help")
    assert code == 0
    assert all(name in out for name in command.PARTS)


@pytest.mark.parametrize("part", command.PARTS)
async def test_help_of_a_part_is_its_own(part: str):
    code, out, error = await run("-m", "lorrery.cli", part, "--help")
    assert code == 0, error
    assert f"Usage: lorrery {part}" in out


@pytest.mark.parametrize("part", command.PARTS)
def test_version_of_a_part(part: str):
    done = CliRunner().invoke(command.app, [part, "--version"])
    assert (done.exit_code, done.output) == (0, f"lorrery {part} {VERSION}\n")


async def imported_for(*arguments: str) -> set[str]:
    """Return the modules that a process has imported once it has done `lorrery ARGUMENTS`."""
    script = (
        f"import json, sys\nfrom lorrery.cli.main import main\nsys.argv[1:] = {list(arguments)}\n"
        "try: main()\nfinally: print(json.dumps(sorted(sys.modules)))"
    )
    _, out, _ = await run("-c", script)
    return set(json.loads(out.splitlines()[-1]))


async def test_help_imports_no_part():
    modules = await imported_for("--help")
    assert "lorrery.cli.app" in modules
    assert not modules & {
        "grpc",
        "numpy",
        "lorrery.cli.up",
        "lorrery.loadgen",
        "lorrery.scheduler",
        "lorrery.worker",
        "lorrery.router",
        "rich.progress",
    }


@pytest.mark.parametrize("part", ["simulate", "plan", "validate"])
async def test_a_part_that_calls_nobody_imports_nothing_of_grpc(part: str):
    modules = await imported_for(part, "--help")
    assert f"lorrery.cli.{part}" in modules
    assert not modules & {"grpc", "google.protobuf", "prometheus_client", "structlog"}


async def test_up_starts_its_fork_server_before_its_own_slow_imports():
    modules = await imported_for("up", "--help")
    assert "lorrery.service.local.processes" in modules
    assert not modules & {"grpc", "numpy", "lorrery.service.settings"}


@pytest.mark.parametrize(("error", "code"), [(LorreryError("eels"), 1), (SettingsError("eels"), 2)])
def test_our_own_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: LorreryError, code: int
):
    app = typer.Typer()

    @app.command()
    def broken() -> None:
        raise error

    module = types.ModuleType("lorrery.cli.up")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lorrery.cli.up", module)
    monkeypatch.setattr(sys, "argv", ["lorrery", "up"])
    with pytest.raises(SystemExit) as caught:
        command.run()
    assert caught.value.code == code
    assert capsys.readouterr().err == "lorrery: error: eels\n"
