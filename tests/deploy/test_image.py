"""What the image is built from: the engine is given all that a wheel holds."""

from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]


def test_the_context_has_whatever_the_package_links_to() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    admitted = {PurePosixPath(line.removeprefix("!")) for line in lines if line.startswith("!")}
    links = [path for path in (ROOT / "src").rglob("*") if path.is_symlink()]
    targets = {PurePosixPath(path.resolve().relative_to(ROOT)) for path in links}
    assert PurePosixPath("worker") in targets
    assert {target for target in targets if admitted.isdisjoint((target, *target.parents))} == set()
