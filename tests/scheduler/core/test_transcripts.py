"""Short scenarios as transcripts that one can read: `transcripts/*.txt`.

Each file begins with its scenario (what is built, who arrives, who is cancelled) and goes on with what happened, one
event a line. A change that alters one is looked at, and accepted with

    LORRERY_ACCEPT=1 pytest tests/scheduler/core/test_transcripts.py
"""

import os
from pathlib import Path

import pytest

from lorrery.scheduler.core.adapters.loads import Tier
from lorrery.scheduler.core.build import build_replica
from lorrery.scheduler.core.replica_settings import ReplicaSettings
from lorrery.scheduler.core.sequence import Adapter, Sequence
from lorrery.validation.policy.drive import STEP_PS, TOKEN_PS, World, jump

FOLDER = Path(__file__).parent / "transcripts"
HEAD = "# happens"


def play(text: str) -> str:
    """Run a scenario and return it with what happened."""
    scenario = text.partition(HEAD)[0].rstrip()
    settings: dict[str, object] = {}
    adapters: dict[str, Adapter] = {}
    world = World([])
    for line in scenario.splitlines():
        match line.partition("#")[0].split():
            case ["replica", *pairs]:
                for key, _, value in (pair.partition("=") for pair in pairs):
                    settings[key] = int(value) if value.isdigit() else {"yes": True}.get(value, value)
            case ["adapter", name, "rank", rank]:
                adapters[name] = Adapter(name, int(rank))
            case ["at", at, "arrives", handle, "prompt", prompt, "output", output, *rest]:
                adapter = adapters[rest[0]] if rest else None
                sequence = Sequence(int(handle), int(prompt), int(output), arrived_ps=int(at), adapter=adapter)
                sequence.prompt_token_ids = list(range(int(prompt)))
                world.arrivals.append((int(at), sequence, int(output)))
            case ["at", at, "cancel", handle]:
                world.cancels.append((int(at), int(handle)))
            case []:
                pass
            case _:
                raise ValueError(f"no such line: {line}")
    chosen = ReplicaSettings(max_req_total_len=100, **settings)  # type: ignore[arg-type]
    replica = build_replica(chosen, load_ps=lambda adapter, tier: adapter.rank * (100 if tier is Tier.HOST else 1_000))
    lines = [" ".join(["at", f"{entry[1]:>7}", *map(str, (entry[0], *entry[2:]))]) for entry in jump(replica, world)]
    return "\n".join([scenario, "", HEAD, *lines, ""])


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_a_scenario_goes_as_its_transcript_says(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    played = play(text)
    if os.environ.get("LORRERY_ACCEPT"):
        path.write_text(played, encoding="utf-8")
    assert played == text


def test_there_are_transcripts_and_the_step_times_they_assume() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 8
    assert (STEP_PS, TOKEN_PS) == (1_000, 7)
