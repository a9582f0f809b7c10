"""docs/simulator.md: its examples run as they stand."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    exec(compile(example, PAGE.name, "exec"), {})
    assert capsys.readouterr().out


def test_there_are_examples():
    assert len(EXAMPLES) == 4
