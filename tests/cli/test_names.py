"""Names and texts that a command line can hold, and no file or message can."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorrery.cli.demo import app as demo
from lorrery.cli.faults import app as faults
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.tokenizer.file import read_folder
from lorrery.view.record import Record


@pytest.mark.parametrize("read", [Record, read_folder])
def test_a_name_that_no_file_can_have_is_refused(read: Callable[[Path], object]) -> None:
    with pytest.raises(LorreryError, match=r"n{300}: File name too long"):
        read(Path("n" * 300))


@pytest.mark.parametrize(
    ("trace", "reason"), [("n" * 300, "File name too long"), ("nowhere", "No such file"), ("/", "Is a directory")]
)
def test_a_trace_that_the_demo_cannot_read_is_refused(trace: str, reason: str) -> None:
    result = CliRunner().invoke(demo, ["--trace", trace])
    assert isinstance(result.exception, LorreryError)
    assert str(result.exception).startswith(f"--trace {trace}: {reason}")


@pytest.mark.parametrize("command", ["set", "add"])
def test_a_fault_that_is_no_text_is_refused(command: str) -> None:
    result = CliRunner().invoke(faults, [command, "\udcff"])
    assert isinstance(result.exception, SettingsError)
    assert str(result.exception).startswith("RULE '\\udcff' is not UTF-8 text")
