"""What a clean clone is made from: version, locks, wheel, and the commands that README shows."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from lorrery.chassis.version import VERSION

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
README = ROOT / "README.md"
PIN = re.compile(r"^([a-z0-9][a-z0-9.-]*)(?:\[[^\]]*\])?==(\S+)", re.MULTILINE)


def test_the_version_is_the_one_of_pyproject() -> None:
    assert PROJECT["project"]["version"] == VERSION


def test_every_lock_is_there() -> None:
    assert {path.stem for path in LOCKS} == {"run", "dev", "build", "uv"}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_pins_by_hash_and_names_no_host(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "://" not in text
    assert "index-url" not in text
    blocks = re.split(r"\n(?=\S)", text.strip())
    assert blocks
    for block in blocks:
        assert PIN.match(block), block
        assert "--hash=sha256:" in block, block


def test_the_locks_agree_with_one_another() -> None:
    run, dev, build = (
        set(PIN.findall((ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")))
        for name in ("run", "dev", "build")
    )
    assert run <= dev
    dev_names = {name for name, _ in dev}
    assert {(name, version) for name, version in build if name in dev_names} <= dev


def test_every_dependency_is_pinned() -> None:
    for lock, wanted in (
        ("run", PROJECT["project"]["dependencies"]),
        ("dev", PROJECT["project"]["dependencies"] + PROJECT["dependency-groups"]["dev"]),
        ("build", PROJECT["build-system"]["requires"]),
    ):
        pinned = {name for name, _ in PIN.findall((ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8"))}
        names = {re.split(r"[^A-Za-z0-9-]", requirement)[0] for requirement in wanted}
        assert names <= pinned


def test_the_wheel_holds_every_room_and_the_stubs(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="make setup installs the build backend")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"lorrery-{VERSION}-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {"lorrery", f"lorrery-{VERSION}.dist-info"}
    for wanted in ("router", "scheduler/core", "worker/device", "loadgen/workload", "simulator", "chassis", "cli"):
        assert f"lorrery/{wanted}/__init__.py" in names
    assert "lorrery/v1/types_pb2.py" in names
    assert {f"lorrery/worker/device/data/{name}.toml" for name in ("gpus", "models", "engines")} <= set(names)
    for wanted in ("step_time_measured", "slora_measured", "vidur_conv_vllm", "vidur_conv_vllm_steps"):
        assert f"lorrery/validation/data/{wanted}.csv" in names
    assert any(name.endswith("licenses/NOTICE") for name in names)


def shown_commands() -> list[str]:
    """Return the commands of README's shell blocks, without prompt signs, comments and continuation."""
    blocks = re.findall(
        r"^```(?:sh|bash|console)\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").partition(" #")[0].strip() for line in lines]


def test_readme_names_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
    shown = {line.split()[1] for line in shown_commands() if line.startswith("make ")}
    assert {"demo", "test"} <= shown <= targets


def test_readme_shows_the_commands_that_ci_runs() -> None:
    scripts = "\n".join((ROOT / ".ci" / name).read_text(encoding="utf-8") for name in ("run", "compose"))
    shown = shown_commands()
    for command in ("make demo", "make test", "docker compose up"):
        assert any(line.startswith(command) for line in shown), f"README does not show `{command}`"
    assert "make demo" in scripts
    assert "make test" in scripts
    assert re.search(r"docker compose .*\bup\b", scripts)


def test_readme_names_lorrery_commands_that_exist() -> None:
    names = {
        match[1]
        for line in shown_commands()
        if (match := re.match(r"(?:\.venv/bin/)?lorrery ([a-z]+)", line)) is not None
    }
    for name in sorted(names):
        done = subprocess.run(
            [sys.executable, "-m", "lorrery.cli", name, "--help"],
            cwd=ROOT,
            env=os.environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"lorrery {name} --help: {done.stderr}"


def test_what_is_compiled_is_there() -> None:
    hook = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    assert hook["enable-by-default"] is False
    for pattern in hook["modules"]:
        assert list(ROOT.glob(pattern)), pattern
