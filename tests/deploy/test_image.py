"""What the image is built from: the engine is given all that a wheel holds, and images come by names that pin them."""

import re
from pathlib import Path, PurePosixPath

import yaml

ROOT = Path(__file__).parents[2]


def test_the_context_has_whatever_the_package_links_to() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    admitted = {PurePosixPath(line.removeprefix("!")) for line in lines if line.startswith("!")}
    links = [path for path in (ROOT / "src").rglob("*") if path.is_symlink()]
    targets = {PurePosixPath(path.resolve().relative_to(ROOT)) for path in links}
    assert PurePosixPath("worker") in targets
    assert {target for target in targets if admitted.isdisjoint((target, *target.parents))} == set()


def test_every_image_of_a_registry_can_be_pinned_by_a_variable() -> None:
    """docs/security.md gives the command that writes them, with digests, into `.env`."""
    names = set(re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE))
    assert names == {"${PYTHON_IMAGE}", "scratch"}
    found: dict[str, str] = {}
    for file in ("docker-compose.yml", "docker-compose.secured.yml"):
        for name, service in yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))["services"].items():
            python = [service["build"]["args"]["PYTHON_IMAGE"]] if "build" in service else []
            for one in [service["image"], *python] if "image" in service else python:
                variable = re.fullmatch(r"\$\{([A-Z_]+):-([^}]+)\}", one)
                assert variable, f"{file}: {name}: {one}"
                found[variable[1]] = variable[2]
    assert found.pop("IMAGE") == "lorrery:local"  # built here
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert found == dict(re.findall(r"'([A-Z_]+)=\{\{.Name}}@\{\{.Manifest.Digest}}' (\S+) >> .env", page))
