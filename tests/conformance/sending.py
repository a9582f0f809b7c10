"""Sends the corpus to a server and keeps or reads the answers."""

import json
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

from tests.conformance.corpus import Case, cases

FOLDER = Path(__file__).parent / "answers"
SERVERS = {
    "plain": ("--enable-prompt-tokens-details",),
    "tools": ("--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    "key": ("--api-key", "secret"),
}
"""Flags of each server that answers are recorded from, beside `FLAGS`."""
FLAGS = (
    *("--served-model-name", "tiny", "--max-model-len", "1024", "--block-size", "32"),
    *("--enable-lora", "--max-lora-rank", "64", "--max-loras", "4"),
)


class Answer(NamedTuple):
    """An answer to a request of the corpus.

    Attributes:
        name: of the request.
        status: of HTTP.
        type: its content type; None: it has none.
        body: as text.
    """

    name: str
    status: int
    type: str | None
    body: str


def answers(port: int, asked: Sequence[Case]) -> Iterator[Answer]:
    """Send requests to a server on this machine, one after the other; yield its answers."""
    for case in asked:
        connection = HTTPConnection("127.0.0.1", port, timeout=120)
        body = case.body if isinstance(case.body, bytes | None) else json.dumps(case.body).encode()
        headers = dict(case.headers)
        if body is not None:
            headers.setdefault("content-type", "application/json")
        connection.request(case.method, case.path, body, headers)
        response = connection.getresponse()
        text = response.read().decode(errors="backslashreplace")
        connection.close()
        yield Answer(case.name, response.status, response.getheader("content-type"), text)


def recorded(server: str) -> list[tuple[Case, Answer]]:
    """Return the requests for a server with its recorded answers."""
    with (FOLDER / f"{server}.jsonl").open() as file:
        kept = [Answer(*json.loads(line)) for line in file]
    asked = cases(server)
    assert [one.name for one in asked] == [one.name for one in kept], "the corpus has changed: record it anew"
    return list(zip(asked, kept, strict=True))


def record(server: str, port: int) -> int:
    """Record the answers of a server; return how many there are."""
    found = list(answers(port, cases(server)))
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{server}.jsonl").open("w") as file:
        file.writelines(f"{json.dumps(one, ensure_ascii=False)}\n" for one in found)
    return len(found)
