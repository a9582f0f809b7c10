"""What `make test` installs on a bare machine, and what it leaves: `.ci/need`, of a made-up machine."""

import os
import subprocess
from pathlib import Path

import pytest

NEED = Path(__file__).parents[1] / ".ci" / "need"
SHELL = ("sh", "env", "cat", "chmod")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Return the folder of a machine's programs: a shell's, and nothing else."""
    for name in SHELL:
        found = next(path for folder in ("/bin", "/usr/bin") if (path := Path(folder, name)).exists())
        (tmp_path / name).symlink_to(found)
    return tmp_path


def program(machine: Path, name: str, script: str) -> None:
    path = machine / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def need(machine: Path, what: str) -> tuple[int, str]:
    variables = {key: value for key, value in os.environ.items() if key != "LORRERY_CHROMIUM"}
    done = subprocess.run(
        ["/bin/sh", str(NEED), what],
        env={**variables, "PATH": str(machine)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def apt_get(machine: Path, installed: str, script: str = "exit 0") -> None:
    lines = f"#!/bin/sh\\n{script}\\n"
    program(
        machine,
        "apt-get",
        f"[ $1 = install ] || exit 0\nprintf '{lines}' > {machine / installed}\nchmod +x {machine / installed}",
    )


@pytest.mark.parametrize("what", ["chromium", "openssl"])
def test_root_installs_what_is_missing_from_debians_packages(machine: Path, what: str) -> None:
    program(machine, "id", "echo 0")
    apt_get(machine, what)
    assert need(machine, what) == (0, f"installing {what}\n")
    assert need(machine, what) == (0, "")


def test_others_and_other_systems_install_nothing(machine: Path) -> None:
    program(machine, "id", "echo 1000")
    apt_get(machine, "chromium")
    assert need(machine, "chromium") == (1, "")
    (machine / "apt-get").unlink()
    program(machine, "id", "echo 0")
    assert need(machine, "chromium") == (1, "")


def test_a_browser_that_does_not_run_counts_as_none(machine: Path) -> None:
    program(machine, "id", "echo 0")
    apt_get(machine, "chromium-browser", "exit 1")
    assert need(machine, "chromium")[0] == 1
    program(machine, "google-chrome", "exit 0")
    assert need(machine, "chromium") == (0, "")
