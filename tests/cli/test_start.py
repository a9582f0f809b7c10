"""What a command does not import, so that it starts quickly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = ("asyncio", "grpc", "jinja2", "matplotlib", "msgspec", "pydantic_settings", "tokenizers")
RUN = """
import atexit, sys
atexit.register(lambda: print("imported:", *[name for name in {names} if name in sys.modules]))
from lorrery.cli.app import app
app({arguments})
"""


def imported(names: tuple[str, ...], arguments: list[str]) -> list[str]:
    """Return which of the modules a command has imported by its end."""
    code = RUN.format(names=names, arguments=arguments)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LORRERY_")}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    last = shown.stdout.splitlines()[-1]
    assert last.startswith("imported:"), shown.stderr
    return last.split()[1:]


def test_a_simulation_imports_nothing_of_services_text_or_plots() -> None:
    assert imported((*SLOW, "numpy"), ["simulate", "-n", "2"]) == ["numpy"]


def test_the_list_of_commands_imports_neither_settings_nor_numpy() -> None:
    assert imported((*SLOW, "lorrery.service.settings", "numpy"), ["--help"]) == []


def test_a_cluster_s_fork_server_starts_before_settings_are_imported() -> None:
    code = "import sys, lorrery.cli.up; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("flags", "file"),
    [(["--steps"], "steps.csv"), (["--perfetto"], "trace.json"), (["--metrics", "metrics.txt"], "metrics.txt")],
)
def test_a_file_for_which_there_is_no_room_is_named_and_half_of_it_is_not_left(
    tmp_path: Path, flags: list[str], file: str
):
    limit = "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); "
    # -B: the limit would cut off bytecode too, which every later process reads.
    command = [sys.executable, "-B", "-c", limit + "runpy.run_module('lorrery.cli', run_name='__main__')"]
    arguments = ["simulate", "-n", "200", "--out", ".", *flags]
    done = subprocess.run([*command, *arguments], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"lorrery: error: {file}: File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_a_standard_output_that_is_full_is_one_line():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lorrery.cli", "plan"], check=False, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr.startswith("lorrery: error: No space left on device: the standard output")
    assert done.stderr.count("\n") == 1
