"""The pages of docs/ that are made from the code: complete, and as fresh as the code that they are made from."""

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from lab.reference import grpc_page as wire
from lab.reference.__main__ import PAGES
from lab.reference.grpc_page import PROTOS, DescriptorPath, comments_of, grpc_page, read_protos
from lab.reference.pages import DOCS
from lab.reference.settings_page import sections, settings_page
from lorrery.service.settings.cluster import Settings

SETTINGS = [(name, key, field) for name, _, fields in sections(Settings) for key, field in fields.items()]


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_fresh(name: str):
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "stale: run make docs"


def test_every_setting_says_what_it_means():
    assert [f"{name}.{key}" for name, key, field in SETTINGS if not field.description] == []


def test_every_section_says_what_it_is_for():
    assert [name for name, section, _ in sections(Settings) if not section.__doc__] == []


def test_the_wires_page_has_every_file():
    headings = {line.lstrip("# ") for line in grpc_page().splitlines() if line.startswith("#")}
    assert {path.name for path in PROTOS.glob("lorrery/v1/*.proto")} <= headings


def declarations(file: FileDescriptorProto) -> Iterator[tuple[str, DescriptorPath]]:
    """Yield (name, path) of everything that must have a comment."""
    for index, service in enumerate(file.service):
        yield service.name, (wire._SERVICES, index)
        for number, method in enumerate(service.method):
            yield f"{service.name}.{method.name}", (wire._SERVICES, index, wire._MEMBERS, number)
    for index, message in enumerate(file.message_type):
        yield message.name, (wire._MESSAGES, index)
        for number, field in enumerate(message.field):
            yield f"{message.name}.{field.name}", (wire._MESSAGES, index, wire._MEMBERS, number)
    for index, enum in enumerate(file.enum_type):
        yield enum.name, (wire._ENUMS, index)
        for number, value in enumerate(enum.value):
            yield value.name, (wire._ENUMS, index, wire._MEMBERS, number)


def test_every_declaration_of_the_wire_has_a_comment():
    for file in read_protos():
        comments = comments_of(file)
        assert [name for name, path in declarations(file) if path not in comments] == []


def test_a_setting_is_shown_with_default_bounds_and_choices():
    page = settings_page()
    assert '| `policy` | `"req_queue"` | `req_queue`, `fcfs`,' in page
    assert "| `max_num_seqs` | `256` | whole number at least 1 |" in page
    assert "| `max_loras` | unset | whole number at least 1 |" in page
    assert '| `schedulers` | `["127.0.0.1:50052"]` | list: at least 1 text |' in page
