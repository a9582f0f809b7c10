"""Parses options with parts, written as faults are: `flash,at=60,for=30,share=0.8`."""

import math
from collections.abc import Mapping

from lorrery.chassis.errors import SettingsError
from lorrery.loadgen.workload.arrivals import Bursts
from lorrery.loadgen.workload.drift import MOST_ADAPTERS, Diurnal, Drift, Flash, Shift

__all__ = ["parse_bursts", "parse_drift"]

_DRIFT = {
    "diurnal": ("period", "amplitude"),
    "flash": ("at", "for", "share", "adapter"),
    "shift": ("every", "by"),
}
_BURSTS = ("factor", "for", "share")


def parse_drift(text: str) -> Drift:
    """Read a drift of popularity.

    Raises:
        SettingsError: names the error.
    """
    kind, _, rest = text.partition(",")
    if kind not in _DRIFT:
        raise SettingsError(f"--drift {text}: expected {', '.join(_DRIFT)}, then its parts, as in flash,at=60,for=30")
    parts = _parts("--drift", text, rest, _DRIFT[kind])
    try:
        match kind:
            case "diurnal":
                return Diurnal(parts["period"], parts.get("amplitude", 1.0))
            case "flash":
                adapter = parts.get("adapter")
                index = None if adapter is None else _whole("--drift", text, "adapter", adapter)
                return Flash(parts["at"], parts["for"], parts.get("share", 0.5), index)
            case _:
                return Shift(parts["every"], _whole("--drift", text, "by", parts.get("by", 1.0)))
    except KeyError as error:
        raise SettingsError(f"--drift {text}: {error.args[0]} is not given") from None
    except ValueError as error:
        raise SettingsError(f"--drift {text}: {error}") from None


def parse_bursts(text: str) -> Bursts:
    """Read the parameters of bursts.

    Raises:
        SettingsError: names the error.
    """
    parts = _parts("--bursts", text, text, _BURSTS)
    try:
        return Bursts(parts["factor"], parts["for"], parts.get("share", 0.1))
    except KeyError as error:
        raise SettingsError(f"--bursts {text}: {error.args[0]} is not given") from None
    except ValueError as error:
        raise SettingsError(f"--bursts {text}: {error}") from None


def _parts(flag: str, text: str, rest: str, known: tuple[str, ...]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in known or name in found:
            raise SettingsError(f"{flag} {text}: {name!r}; expected each of {', '.join(known)} once at most")
        try:
            found[name] = float(value)
        except ValueError:
            raise SettingsError(f"{flag} {text}: {name} is {value!r}; expected a number") from None
        if not math.isfinite(found[name]):
            raise SettingsError(f"{flag} {text}: {name} is {value}; it must be finite")
    return found


def _whole(flag: str, text: str, name: str, value: float) -> int:
    if value != int(value) or abs(value) > MOST_ADAPTERS:
        raise SettingsError(
            f"{flag} {text}: {name} is {value:g}; expected a whole number from -{MOST_ADAPTERS:,} to {MOST_ADAPTERS:,}"
        )
    return int(value)
