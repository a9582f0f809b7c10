"""The tutorial shows the example plug-in as it is."""

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_policy_in_the_tutorial_is_the_example() -> None:
    example = (DOCS / "examples" / "patient.py").read_text(encoding="utf-8").rstrip()
    assert f"```python\n{example}\n```" in (DOCS / "tutorial.md").read_text(encoding="utf-8")
