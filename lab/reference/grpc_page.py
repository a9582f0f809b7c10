"""docs/grpc.md: every RPC, message, field and enum value with its comment, from protos/lorrery/v1/*.proto."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from lab.reference.pages import DO_NOT_EDIT, DOCS, paragraph, sentence, table

PROTOS = DOCS.parent / "protos"
FILES = ("router.proto", "types.proto", "status.proto", "scheduler.proto", "frame.proto", "simulation.proto")
"""In the order of the page: what clients need first."""

INNER = ("scheduler.proto", "frame.proto", "simulation.proto")
"""Not for clients: the page has their calls, the files their messages, each field with its comment."""

INTRODUCTION = f"""# gRPC

{DO_NOT_EDIT.format("protos/lorrery/v1/*.proto")}

Package `lorrery.v1`, imported as `lorrery.v1`. Clients need `RouterService`; `SchedulerService` is spoken inside the
cluster, and `SimulationService` between a simulation and an autoscaler of your own. The page has the messages that
clients need; those of the others stand in the files, with a comment for each field. Every service also answers gRPC
health checks and server reflection. Errors: [failures.md](failures.md). [The feed](monitoring.md#the-feed) shows the
frames of `WatchCluster` as JSON.
"""

# Field numbers of descriptor.proto, by which the compiler's comments name what they belong to.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_MEMBERS = 2
"""Fields of a message, values of an enum, methods of a service."""

DescriptorPath = tuple[int, ...]


def grpc_page() -> str:
    """Return the page."""
    lines = [INTRODUCTION]
    for file in read_protos():
        comments = comments_of(file)
        name = Path(file.name).name
        lines += [f"## {name}", ""]
        for index, service in enumerate(file.service):
            lines += _service(service, comments, (_SERVICES, index))
        if name in INNER:
            lines += paragraph(f"Messages: `protos/lorrery/v1/{name}`.")
            continue
        rows: list[tuple[str, ...]] = []
        for index, message in enumerate(file.message_type):
            if message.field:
                rows += _message(message, comments, (_MESSAGES, index))
        for index, enum in enumerate(file.enum_type):
            rows += _enum(enum, comments, (_ENUMS, index))
        lines += table(("name", "number", "type", ""), rows)
    return _linked("\n".join(lines).rstrip() + "\n")


def read_protos() -> Sequence[FileDescriptorProto]:
    """Compile the protos, comments included; in the order of `FILES`."""
    names = [f"lorrery/v1/{name}" for name in FILES]
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / "protos.binpb"
        options = ["--include_source_info", f"--descriptor_set_out={compiled}", f"-I{PROTOS}"]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *names], check=True)  # noqa: S603  our own
        found = FileDescriptorSet.FromString(compiled.read_bytes())
    return sorted(found.file, key=lambda file: names.index(file.name))


def comments_of(file: FileDescriptorProto) -> dict[DescriptorPath, str]:
    """Return the comment before each declaration, on one line, by the declaration's path in the descriptor."""
    return {
        tuple(place.path): sentence(place.leading_comments)
        for place in file.source_code_info.location
        if place.leading_comments.strip()
    }


def _service(service: ServiceDescriptorProto, comments: dict[DescriptorPath, str], path: DescriptorPath) -> list[str]:
    lines = [f"### {service.name}", "", *paragraph(comments.get(path, ""))]
    rows = []
    for number, method in enumerate(service.method):
        sent = ("stream " if method.client_streaming else "") + _short(method.input_type)
        answer = ("stream " if method.server_streaming else "") + _short(method.output_type)
        rows.append((f"`{method.name}`", sent, answer, comments.get((*path, _MEMBERS, number), "")))
    return lines + table(("RPC", "takes", "returns", ""), rows)


def _heading(name: str, comment: str) -> tuple[str, ...]:
    """Return the row that a message or an enum begins with, which links to it lead to."""
    return (f'<a id="{name.lower()}"></a>**{name}**', "", "", comment)


def _message(
    message: DescriptorProto, comments: dict[DescriptorPath, str], path: DescriptorPath
) -> list[tuple[str, ...]]:
    maps = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
    return [
        _heading(message.name, comments[path]),
        *(
            (f"`{field.name}`", str(field.number), _kind(field, message, maps), comments[*path, _MEMBERS, number])
            for number, field in enumerate(message.field)
        ),
    ]


def _enum(
    enum: EnumDescriptorProto, comments: dict[DescriptorPath, str], path: DescriptorPath
) -> list[tuple[str, ...]]:
    return [
        _heading(enum.name, comments[path]),
        *(
            (f"`{value.name}`", str(value.number), "", comments[*path, _MEMBERS, number])
            for number, value in enumerate(enum.value)
        ),
    ]


def _kind(field: FieldDescriptorProto, message: DescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    if (entry := maps.get(field.type_name.rpartition(".")[2])) is not None:
        key, value = (_plain(one) for one in entry.field)
        return f"map of {key} to {value}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {_plain(field)}"
    if field.proto3_optional:
        return f"optional {_plain(field)}"
    if field.HasField("oneof_index"):
        return f"{_plain(field)}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return _plain(field)


def _plain(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _short(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _short(type_name: str) -> str:
    """Name a message or enum of the package; `_linked` makes links of those that the page shows."""
    return f"[{type_name.rpartition('.')[2]}]"


def _linked(page: str) -> str:
    shown = set(re.findall(r'<a id="([^"]+)">', page))

    def link(name: re.Match[str]) -> str:
        anchor = name[1].lower()
        return f"[{name[1]}](#{anchor})" if anchor in shown else f"`{name[1]}`"

    return re.sub(r"\[([A-Z]\w+)\](?!\()", link, page)
