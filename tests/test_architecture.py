"""Who may import whom, and what a pure room may touch (docs/architecture.md).

import-linter's contracts in pyproject.toml hold between modules; what they cannot say is checked here on the syntax
trees: which part of the standard library and of numpy a pure room uses, and where protobuf meets the core.
"""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lorrery"
LINKED = ("loadgen", "router", "scheduler", "worker")
"""Rooms on a request's way: they lie at the top of the tree, and links make them parts of the package."""
ROOMS = (*LINKED, "cli", "service", "simulator", "tokenizer", "validation", "view", "vocabulary")
PURE = ("scheduler/core", "worker/device", "loadgen/workload", "vocabulary")

NOT_PURE = {
    # clocks
    "time", "sched", "timeit",
    # concurrency
    "asyncio", "threading", "multiprocessing", "concurrent", "queue", "signal", "contextvars",
    # I/O and the world outside
    "io", "os", "pathlib", "shutil", "tempfile", "glob", "fileinput", "mmap", "select", "selectors", "socket", "ssl",
    "subprocess", "urllib", "http", "sys", "platform", "getpass", "logging", "warnings", "sqlite3", "pickle", "shelve",
    # chance that no generator gives
    "random", "secrets", "uuid",
}  # fmt: skip
"""Modules of the standard library that read a clock, wait, do I/O, or draw from global chance."""

NUMPY_RANDOM = {
    "Generator", "BitGenerator", "SeedSequence", "PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64", "RandomState",
}  # fmt: skip
"""What of `numpy.random` is not global: types, to be made from a seed or passed in."""

NUMPY_IO = {"load", "loadtxt", "genfromtxt", "fromfile", "save", "savetxt", "savez", "savez_compressed", "memmap"}

IMPURE_CALLS = {"open", "input", "print", "exec", "eval", "__import__", "breakpoint"}

CLOCK_METHODS = {"now", "utcnow", "today"}
"""Of `datetime`, whose parsing and arithmetic are pure."""

CORE_ROOMS = ("lorrery.scheduler.core", "lorrery.worker.device", "lorrery.loadgen.workload")


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (PACKAGE / folder).rglob("*.py"))


def imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield (dotted name, line) of each import, `from a import b` as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            yield from ((f"{node.module}.{name.name}", node.lineno) for name in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def at_run_time(tree: ast.Module) -> ast.Module:
    """Return a tree without what is only there for type checkers."""

    class Run(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            self.generic_visit(node)
            return node.orelse if dotted(node.test) == "TYPE_CHECKING" else node

    return Run().visit(tree)


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` of an attribute chain; what is none gives an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr}"
    return ""


def impurities(source: str, room: str) -> list[str]:
    """What `source`, a module of the pure room `room` (dotted), must not have."""
    tree = at_run_time(ast.parse(source))
    allowed = {room, "lorrery.vocabulary"} | ({"lorrery.worker.device"} if room == "lorrery.scheduler.core" else set())
    found = []
    for name, line in imports(tree):
        top = name.partition(".")[0]
        if top == "numpy":
            parts = name.split(".")
            if parts[1:2] == ["random"] and len(parts) > 2 and parts[2] not in NUMPY_RANDOM:
                found.append(f"line {line}: {name} is global chance")
        elif top in NOT_PURE:
            found.append(f"line {line}: {name} is not pure")
        elif top not in sys.stdlib_module_names and not any(within(name, package) for package in allowed):
            found.append(f"line {line}: {name} is neither of this room, nor numpy, nor the standard library")
    seeded = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and (node.args or node.keywords)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            found.append(f"line {node.lineno}: {node.func.id}() is not pure")
        if isinstance(node, ast.Attribute):
            match dotted(node).split("."):
                case ["np" | "numpy", "random", "default_rng"] if id(node) in seeded:
                    pass  # a function of its seed; without one it would draw from the machine's entropy
                case ["np" | "numpy", "random", name] if name not in NUMPY_RANDOM:
                    found.append(f"line {node.lineno}: np.random.{name} is chance of no generator passed in")
                case [*_, "datetime" | "date", name] if name in CLOCK_METHODS:
                    found.append(f"line {node.lineno}: {name}() reads the clock")
                case ["np" | "numpy", name] if name in NUMPY_IO:
                    found.append(f"line {node.lineno}: np.{name} is I/O")
    return found


def test_import_linter_keeps_every_contract() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    environment = os.environ | {"COLUMNS": "120"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


@pytest.mark.parametrize("path", modules(*PURE), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_pure_room_has_no_clock_no_io_and_no_chance_of_its_own(path: Path) -> None:
    room = next(room for room in PURE if path.is_relative_to(PACKAGE / room))
    assert impurities(path.read_text(encoding="utf-8"), f"lorrery.{room.replace('/', '.')}") == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from time import monotonic",
        "import os.path",
        "from pathlib import Path",
        "import logging",
        "from datetime import datetime\ndatetime.now()",
        "import random",
        "import grpc",
        "from lorrery.service.errors import LorreryError",
        "from lorrery.scheduler.service import Scheduler",
        "from numpy.random import shuffle",
        "import numpy as np\nnp.random.seed(1)",
        "import numpy as np\nrng = np.random.default_rng()",
        "import numpy as np\nnp.loadtxt('f')",
        "open('f')",
        "def f():\n    import asyncio",
    ],
)
def test_the_check_sees_what_is_not_pure(source: str) -> None:
    assert len(impurities(source, "lorrery.scheduler.core")) == 1


def compiled_modules() -> list[Path]:
    """Return the files that the wheel's build compiles."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    modules, interpreted = (
        {path for pattern in hook[name] for path in ROOT.glob(pattern)} for name in ("modules", "interpreted")
    )
    return sorted(modules - interpreted)


def test_no_compiled_class_is_abstract_by_abc() -> None:
    """The instances of such a class would get weak references from mypyc that outlive them."""
    paths = compiled_modules()
    assert len(paths) > 80
    abstract = [
        path.relative_to(ROOT).as_posix()
        for path in paths
        for node in ast.walk(ast.parse(path.read_bytes()))
        if (isinstance(node, ast.ImportFrom) and node.module == "abc")
        or (isinstance(node, ast.Import) and any(alias.name == "abc" for alias in node.names))
    ]
    assert abstract == []


def test_the_check_lets_pure_code_pass() -> None:
    source = (
        "import heapq\nimport numpy as np\nfrom numpy.random import Generator\n"
        "from lorrery.scheduler.core.acceptance import Limits\nfrom lorrery.worker.device.batch import Batch\n"
        "def draw(rng: np.random.Generator) -> float:\n    return float(rng.random())\n"
        "def generator(seed: int) -> Generator:\n    return np.random.default_rng(seed)\n"
    )
    assert impurities(source, "lorrery.scheduler.core") == []
    assert impurities(source, "lorrery.worker.device") != []


STREAM_HANDLERS = {"streams.py", "hosted.py", "attachment.py"}
"""Who owns a stream hands its messages to the wire module, and what that makes of them to the core."""


@pytest.mark.parametrize("path", modules(*ROOMS), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_only_wire_modules_touch_both_messages_and_core_types(path: Path) -> None:
    if path.name.startswith("wire") or path.name in STREAM_HANDLERS:
        return
    names = [name for name, _ in imports(ast.parse(path.read_text(encoding="utf-8")))]
    messages = [name for name in names if within(name, "lorrery.v1") and name.endswith("_pb2")]
    core = [name for name in names if any(within(name, room) for room in CORE_ROOMS)]
    assert not (messages and core), f"{messages} meet {core}: conversions live in wire.py"


def imported_modules(source: str, known: set[str]) -> set[str]:
    """Which of the known modules `source` imports, anywhere in it; what only a type checker sees counts too."""
    names = {name for name, _ in imports(ast.parse(source))}
    return {name if name in known else name.rpartition(".")[0] for name in names} & known


def import_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a ring, the first one again at the end; empty: there are none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for imported in sorted(graph[module]):
            if found := visit(imported, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := visit(module, []))), [])


@pytest.mark.parametrize("room", ROOMS)
def test_no_modules_of_a_room_import_one_another_in_a_ring(room: str) -> None:
    sources = {
        "lorrery." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in modules(room)
        if path.name != "__init__.py"
    }
    graph = {name: imported_modules(source, set(sources)) for name, source in sources.items()}
    assert import_cycle(graph) == []


def test_the_check_sees_a_ring_that_only_a_type_checker_would() -> None:
    known = {"lorrery.a.one", "lorrery.a.two", "lorrery.a.three"}
    graph = {
        "lorrery.a.one": imported_modules("from lorrery.a import two", known),
        "lorrery.a.two": imported_modules("import lorrery.a.three", known),
        "lorrery.a.three": imported_modules("if TYPE_CHECKING:\n    from lorrery.a.one import One", known),
    }
    assert import_cycle(graph) == ["lorrery.a.one", "lorrery.a.two", "lorrery.a.three", "lorrery.a.one"]
    assert import_cycle(graph | {"lorrery.a.three": set()}) == []


@pytest.mark.parametrize("room", LINKED)
def test_a_room_on_a_request_s_way_lies_at_the_top_and_is_part_of_the_one_package(room: str) -> None:
    assert (PACKAGE / room).readlink() == Path("../..") / room
    assert Path(import_module(f"lorrery.{room}").__file__).samefile(ROOT / room / "__init__.py")


def test_every_room_is_known_here() -> None:
    found = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert found == {*ROOMS, "v1", "vllm"}


def test_the_laboratory_is_no_part_of_the_product() -> None:
    """That the product imports nothing of it is a contract of import-linter."""
    assert find_spec("lab") is not None
    assert find_spec("lorrery.lab") is None


@pytest.mark.parametrize("room", LINKED)
def test_a_room_cannot_be_imported_under_a_second_name(room: str) -> None:
    command = [sys.executable, "-c", f"import {room}"]  # from the top of the tree, where the folder is to be found
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"this is lorrery.{room}" in done.stderr


def test_the_wire_resolves_to_this_tree() -> None:
    found = Path(import_module("lorrery.v1.types_pb2").__file__)
    assert found.samefile(ROOT / "protos" / "lorrery" / "v1" / "types_pb2.py")


@pytest.mark.parametrize("owner", ["router", "scheduler", "worker"])
def test_a_section_of_the_settings_imports_nothing_of_its_room_but_what_is_pure(owner: str) -> None:
    allowed = ("lorrery.service", *(f"lorrery.{room.replace('/', '.')}" for room in PURE))
    tree = ast.parse((ROOT / owner / "settings.py").read_text(encoding="utf-8"))
    ours = [name for name, _ in imports(tree) if within(name, "lorrery")]
    assert [name for name in ours if not any(within(name, package) for package in allowed)] == []


@pytest.mark.parametrize("room", ["service", "router", "scheduler", "worker"])
def test_no_service_reads_the_time_of_day(room: str) -> None:
    """It jumps, and differs between hosts; logs alone are stamped with it, by structlog."""
    for path in modules(room):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {name.split(".")[0] for name, _ in imports(tree)}
        assert "datetime" not in imported, path
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
                # Versions of adapters begin with it, so that a restart does not repeat them; they only ever grow.
                versions = path == PACKAGE / "scheduler" / "adapters.py" and node.attr == "time_ns"
                # What OpenAI's clients read as `created`.
                stamps = path == PACKAGE / "router" / "http" / "openai_shapes.py" and node.attr == "time"
                # What a subscriber to vLLM's KV events reads as a batch's time.
                kv_events = ("worker/kv_events.py", "router/edges/engines/smg.py")
                # What Prometheus has as the value of vllm:lora_requests_info, by which pickers find the latest.
                of_vllm = (*kv_events, "service/telemetry/engine_metrics.py")
                stamps = stamps or (path.relative_to(PACKAGE).as_posix() in of_vllm and node.attr == "time")
                # Whether a certificate holds, for a warning, with its dates.
                dates = path == PACKAGE / "service" / "network" / "tls.py" and node.attr in (
                    "time",
                    "strptime",
                    "strftime",
                    "gmtime",
                )
                stamps = stamps or dates
                # Spans have Unix times, which follow from the monotonic clock and this one look.
                stamps = stamps or (path == PACKAGE / "service" / "telemetry" / "tracing.py" and node.attr == "time_ns")
                known = {"monotonic", "monotonic_ns", "sleep", "thread_time", "process_time"}
                assert versions or stamps or node.attr in known, f"{path}:{node.lineno}"
