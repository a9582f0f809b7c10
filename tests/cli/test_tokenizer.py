"""`lorrery tokenizer`."""

from pathlib import Path

from typer.testing import CliRunner

from lorrery.cli.tokenizer import app
from lorrery.service.errors import LorreryError
from lorrery.tokenizer.file import FileTokenizer


def test_it_says_where_the_tokenizer_is_and_copies_it(tmp_path: Path) -> None:
    there = Path(CliRunner().invoke(app, []).output.strip())
    copy = tmp_path / "a" / "copy"
    assert CliRunner().invoke(app, [str(copy)]).output.strip() == str(copy)
    text = "user: about </s> me"
    assert FileTokenizer(copy).encode_prompt(text) == FileTokenizer(there).encode_prompt(text)
    again = CliRunner().invoke(app, [str(copy)])
    assert isinstance(again.exception, LorreryError)
    assert "already exists" in str(again.exception)
