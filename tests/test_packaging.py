"""What a clean clone is made from: version, locks, wheel, and the commands that README shows."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest

from lorrery.service.files.shipped import CORPUS, DEFAULT_SETTINGS, TRACES, golden_excerpts
from lorrery.service.installed import VERSION
from tests.test_architecture import PURE, ROOMS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HOOK = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
IN_ALL = EXTRAS["all"][0].removeprefix("lorrery[").removesuffix("]").split(",")
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
README = ROOT / "README.md"
PIN = re.compile(r"^([a-z0-9][a-z0-9.-]*)(?:\[[^\]]*\])?==(\S+)", re.MULTILINE)


def test_the_version_is_the_one_of_pyproject() -> None:
    assert PROJECT["project"]["version"] == VERSION


def test_every_lock_is_there() -> None:
    assert {path.stem for path in LOCKS} == {"base", "run", "dev", "build", "uv"}


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
    base, run, dev, build = (
        set(PIN.findall((ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")))
        for name in ("base", "run", "dev", "build")
    )
    assert base <= run <= dev
    dev_names = {name for name, _ in dev}
    assert {(name, version) for name, version in build if name in dev_names} <= dev


def test_every_dependency_is_pinned() -> None:
    for lock, wanted in (
        ("base", PROJECT["project"]["dependencies"]),
        ("run", [requirement for extra in IN_ALL for requirement in EXTRAS[extra]]),
        ("dev", PROJECT["project"]["dependencies"] + PROJECT["dependency-groups"]["dev"]),
        ("build", PROJECT["build-system"]["requires"] + HOOK["dependencies"]),
    ):
        pinned = {name for name, _ in PIN.findall((ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8"))}
        names = {re.split(r"[^A-Za-z0-9-]", requirement)[0] for requirement in wanted}
        assert names <= pinned


def build(target: str, source: Path, folder: Path) -> Path:
    """Build an sdist or a wheel, the latter without its compiled core, which takes a minute and is CI's (.ci/wheel)."""
    pytest.importorskip("hatchling", reason="make setup installs the build backend")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)],
        cwd=source,
        env=os.environ | {"HATCH_BUILD_NO_HOOKS": "1"},
        check=True,
        capture_output=True,
    )
    (built,) = folder.iterdir()
    return built


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_every_room_and_the_stubs(wheel: Path) -> None:
    assert wheel.name.startswith(f"lorrery-{VERSION}-")
    names = contents(wheel).keys()
    assert {name.partition("/")[0] for name in names} == {"lorrery", f"lorrery-{VERSION}.dist-info"}
    for wanted in (*ROOMS, *PURE):
        assert f"lorrery/{wanted}/__init__.py" in names
    assert "lorrery/v1/types_pb2.py" in names
    assert "lorrery/py.typed" in names
    assert "[pytest11]\nlorrery = lorrery.pytest_plugin" in (
        contents(wheel)[f"lorrery-{VERSION}.dist-info/entry_points.txt"].decode()
    )
    assert {f"lorrery/worker/device/data/{name}.toml" for name in ("gpus", "models", "engines")} <= set(names)
    assert {f"lorrery/view/page/{name}" for name in ("index.html", "style.css", "main.js", "icon.svg")} <= set(names)
    for wanted in ("step_time_measured", "slora_measured", "vidur_conv_vllm", "vidur_conv_vllm_steps"):
        assert f"lorrery/validation/data/{wanted}.csv" in names
    assert {name for name in ("LICENSE", "NOTICE") if f"lorrery-{VERSION}.dist-info/licenses/{name}" in names} == {
        "LICENSE",
        "NOTICE",
    }


def test_the_wheel_holds_what_the_commands_use_by_default(wheel: Path) -> None:
    held = contents(wheel)
    wanted = [DEFAULT_SETTINGS, CORPUS, *TRACES.values(), *golden_excerpts()]
    assert len(wanted) > 4
    for path in wanted:
        name = path.relative_to(ROOT / "src").as_posix()
        assert held[name] == path.read_bytes(), name
    for folder in ("corpora", "golden", "traces"):
        assert f"lorrery/data/{folder}/README.md" in held, "sources and licences lie beside the files"


def test_what_ships_is_there_once() -> None:
    for path in (ROOT / "src" / "lorrery" / "data").iterdir():
        assert path.is_symlink(), f"{path.name} is a copy"


def test_the_sdist_alone_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        assert {f"lorrery-{VERSION}/{name}" for name in ("LICENSE", "NOTICE")} <= set(archive.getnames())
        archive.extractall(tmp_path, filter="data")
    rebuilt = build("wheel", tmp_path / f"lorrery-{VERSION}", tmp_path / "wheel")
    assert contents(rebuilt) == contents(wheel)


def test_without_a_compiler_the_wheel_is_interpreted_and_the_build_says_so(tmp_path: Path) -> None:
    pytest.importorskip("mypyc", reason="make setup installs it")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"CC": "false", "LDSHARED": "false"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert "interpreted core" in done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [f"lorrery-{VERSION}-py3-none-any.whl"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler is looked for first")
def test_errors_of_what_is_compiled_are_in_the_warning_and_libraries_of_the_rest_are_not_needed(tmp_path: Path) -> None:
    pytest.importorskip("mypyc", reason="make setup installs it")
    shutil.copy(ROOT / "hatch_build.py", tmp_path)
    for name, text in {
        "pyproject.toml": """
            [project]
            name = "small"
            version = "1"
            [tool.hatch.build.targets.wheel.hooks.custom]
            modules = ["small/compiled.py"]
            """,
        "small/__init__.py": "",
        "small/compiled.py": "from small.shell import Shell\nshells: int = [Shell]\n",
        "small/shell.py": "import absent_library\nclass Shell(absent_library.Base):\n    size: int = 'large'\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert "interpreted core" in said
    assert "small/compiled.py:2: error: Incompatible types in assignment" in said
    assert "shell.py" not in said


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
    scripts = "\n".join((ROOT / ".ci" / name).read_text(encoding="utf-8") for name in ("run", "compose", "wheel"))
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
    for pattern in (*HOOK["modules"], *HOOK["interpreted"]):
        assert list(ROOT.glob(pattern)), pattern
