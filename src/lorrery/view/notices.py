"""What page and terminal say is wrong: notices, made from what the rules find (`rules.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

Severity = Literal["bad", "warn"]
"""Bad: work is stopped or lost; warn: it continues, but worse than it could."""
_MANY = 3
"""Notices of one rule that are listed separately; more are merged into one."""
_LONGEST_NAME, _LONGEST_OF_MANY = 32, 20
"""Characters of a name in a title."""


class Subject(msgspec.Struct, array_like=True, frozen=True):
    """What a notice concerns; `key` is that of the model, of a scheduler its address."""

    kind: Literal["scheduler", "worker", "adapter", "tenant"]
    key: str | None
    name: str


class Notice(msgspec.Struct, frozen=True):
    """A problem.

    Attributes:
        rule: the rule that found it.
        title: the problem, with names and figures.
        why: the rule, so that a reader can check it.
        subjects: what it concerns; empty: the whole cluster.
    """

    rule: str
    severity: Severity
    title: str
    why: str
    subjects: list[Subject] = []


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule finds of one subject, or of the cluster; `many` is the title for several subjects together."""

    title: str
    why: str
    subject: Subject | None = None
    many: str = ""


def notices_of(rule: str, severity: Severity, findings: Sequence[Finding]) -> list[Notice]:
    """Return the notices of a rule's findings."""
    subjects = [one.subject for one in findings if one.subject is not None]
    if len(subjects) <= _MANY:
        return [
            Notice(rule, severity, one.title, one.why, [] if one.subject is None else [one.subject]) for one in findings
        ]
    first = findings[0]
    names = ", ".join(short(subject.name, _LONGEST_OF_MANY) for subject in subjects[:_MANY])
    title = f"{len(subjects):,} {subjects[0].kind}s ({names}, ...): {first.many}"
    return [Notice(rule, severity, title, first.why, subjects)]


def short(name: str, longest: int = _LONGEST_NAME) -> str:
    """Return a name, cut to so many characters with an ellipsis."""
    return name if len(name) <= longest else f"{name[: longest - 3]}..."


def span(seconds: float) -> str:
    """Return a duration: 5 s, 2 min 5 s, 1 h 2 min."""
    whole = max(0, int(seconds))
    parts = (whole // 3600, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")
    return " ".join([f"{number} {unit}" for number, unit in parts if number][:2]) or "0 s"


def plural(number: float, noun: str) -> str:
    """Return a count and its noun: 1 request, 2 requests."""
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"
