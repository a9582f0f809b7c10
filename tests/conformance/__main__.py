"""Records a real vLLM's answers, or shows where a running server differs from them.

    python -m tests.conformance record DIR
    python -m tests.conformance compare plain PORT [PATTERN]

DIR has what `../shared/engines/vllm-cpu DIR src/lorrery/tokenizer/shipped` makes: a program `serve`, and folders with
adapters.
"""

import re
import subprocess
import sys
import time
from collections import defaultdict
from http.client import HTTPConnection
from pathlib import Path

from tests.conformance.compare import differing
from tests.conformance.sending import FLAGS, SERVERS, answers, record, recorded

_PORT = 8190


def main() -> None:
    """Run the command."""
    match sys.argv[1:]:
        case ["record", folder]:
            for server in SERVERS:
                _record(server, Path(folder))
        case ["compare", server, port, *pattern]:
            _compare(server, int(port), pattern[0] if pattern else None)
        case _:
            sys.exit(__doc__)


def _record(server: str, folder: Path) -> None:
    adapters = (f"{name}={folder}/loras/{name}" for name in ("l0", "l1"))
    flags = (*FLAGS, *SERVERS[server], "--lora-modules", *adapters, "--host", "127.0.0.1", "--port", str(_PORT))
    with subprocess.Popen([folder / "serve", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not _is_ready():
                assert process.poll() is None, f"vLLM ended with {process.returncode}"
                time.sleep(1)
            print(server, record(server, _PORT))
        finally:
            process.terminate()


def _is_ready() -> bool:
    connection = HTTPConnection("127.0.0.1", _PORT, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _compare(server: str, port: int, pattern: str | None) -> None:
    pairs = [(case, theirs) for case, theirs in recorded(server) if pattern is None or re.search(pattern, case.name)]
    kinds = defaultdict[str, list[str]](list)
    for (case, theirs), ours in zip(pairs, answers(port, [case for case, _ in pairs]), strict=True):
        found = differing(case, theirs, ours)
        if pattern and found:
            print(case.name, *found, sep="\n    ")
        for one in found:
            kinds[re.sub(r"\[\d+\]", "[]", one)].append(case.name)
    if not pattern:
        for kind, names in sorted(kinds.items(), key=lambda item: -len(item[1])):
            print(len(names), kind, "|", names[0][:80])
    print(f"{len(pairs)} requests, {len({name for names in kinds.values() for name in names})} answers differ")


if __name__ == "__main__":
    main()
