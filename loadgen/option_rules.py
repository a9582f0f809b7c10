"""Checks workload options: their bounds, their combinations, and that each has an effect.

An option without effect is refused: accepted silently, it would look as if it had been applied, and a sweep over it
would draw a flat line as if it were a result. An option counts as given if it differs from its default.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from lorrery.loadgen.option_texts import TRACE, parse_bursts, parse_drift
from lorrery.loadgen.options import DEFAULTS, OPTIONS, RECORDED, LoadOption, LoadOptions
from lorrery.loadgen.workload.request import MOST_TOKENS
from lorrery.service.errors import SettingsError
from lorrery.service.options import flag_of

_TRACE_ALONE = "--trace does not go with --workload {}; --workload trace plays a file of any known form"
_LEAST_CV, _MOST_CV = 1e-6, 1e6
"""Of arrivals; beyond these limits the gamma distribution exceeds doubles."""
_MOST_TURNS = 10_000
"""In a session."""


def check(options: LoadOptions) -> None:
    """Check all options and their combinations.

    Of `trace`, whose file is not open yet, those are refused that go neither with recorded requests nor with
    conversations; `check_opened` checks again.

    Raises:
        SettingsError: names the option.
    """
    if options.workload == TRACE and options.trace is not None:
        with suppress(SettingsError):
            check_opened(replace(options, workload="sharegpt"))
            return
    check_opened(options)


def check_opened(options: LoadOptions) -> None:
    """Check all options and their combinations, `trace` as recorded requests.

    Raises:
        SettingsError: names the option.
    """
    for reasons in (_beyond_bounds, _excluded, _without_effect):
        if why := next(reasons(options), None):
            raise SettingsError(why)
    lengths = {"--input-range": options.prompt_lengths, "--output-range": options.output_lengths}
    for flag, (least, most) in lengths.items():
        if most > MOST_TOKENS:
            raise SettingsError(f"{flag} goes to {most} tokens; at most {MOST_TOKENS} can be drawn")
        _check_range(flag, least, most, half_open=options.workload == "slora")
    _check_range("--turns", *options.turns_range)
    if options.shared_prefix is not None:
        _check_shared_prefix(options, *options.shared_prefix)
    if options.bursts is not None:
        parse_bursts(options.bursts)
    if options.drift is not None:
        parse_drift(options.drift)


def _beyond_bounds(options: LoadOptions) -> Iterator[str]:
    """Yield the options beyond the bounds of their rows."""
    for name, option in OPTIONS.items():
        value = getattr(options, name)
        if value is None or (option.above is None and option.least is None):
            continue
        least = -math.inf if option.least is None else option.least
        if least <= value <= option.most and (option.above is None or value > option.above):
            continue
        in_short = isinstance(value, float) and (option.above is not None or option.must_be)
        yield f"{flag_of(name, option)} is {f'{value:g}' if in_short else value}; it must be {_bounds_in_words(option)}"
    if not _LEAST_CV <= options.cv <= _MOST_CV:
        yield f"--cv is {options.cv:g}; it must be from {_LEAST_CV:g} to {_MOST_CV:g}"


def _bounds_in_words(option: LoadOption) -> str:
    if option.must_be:
        return option.must_be
    if option.above is not None:
        return f"above {option.above:g} and at most {option.most:g}"
    limit = f" and at most {option.most:,.0f}" if option.most < math.inf else ""
    return f"{option.least:g} or more{limit}"


def _excluded(options: LoadOptions) -> Iterator[str]:
    """Yield why options exclude each other, or need one that is not given."""
    workload, trace, turns = options.workload, options.trace, options.turns
    if workload not in (*RECORDED, "sharegpt") and trace is not None:
        yield _TRACE_ALONE.format(workload)
    if workload in (TRACE, "sharegpt") and trace is None:
        yield f"--workload {workload} needs --trace FILE"
    if turns is not None and turns[1] > _MOST_TURNS:
        yield f"--turns goes to {turns[1]}; a session has {_MOST_TURNS:,} at most"
    if options.bursts is not None and options.cv != 1:
        yield "give --bursts or --cv, not both"
    if options.drift is not None and workload == "slora":
        yield "--drift does not go with --workload slora"
    yield from _unclear_lengths(options)
    if options.prompt_ids and options.turns_range[1] > 1:
        yield "--prompt-ids does not go with sessions of several turns: answers come as text"
    if options.adapter_dirs and options.adapters:
        yield "give --adapters or --adapter-dirs, not both"
    if options.adapter_dirs and workload == "slora" and options.num_adapters is None:
        yield "--adapter-dirs needs --num-adapters"
    if options.adapter_exponent is not None and workload == "slora":
        yield "slora's skew is --alpha"
    if options.ignore_eos and options.max_new_tokens is not None:
        yield "--max-new-tokens needs --no-ignore-eos"
    if options.model and options.protocol == "grpc":
        yield "--model goes with --protocol openai, openai-chat and slora"
    if options.prompt_ids and options.protocol != "openai":
        yield "--prompt-ids goes with --protocol openai (grpc has ids)"


def _unclear_lengths(options: LoadOptions) -> Iterator[str]:
    """Yield why lengths or the number of requests are given twice, or not at all."""
    both = (
        ("input", options.input_tokens, options.input_range),
        ("output", options.output_tokens, options.output_range),
    )
    for name, most, given in both:
        if most is not None and given is not None:
            yield f"--{name} {most} and --{name}-range {_in_words(given)} both say how long it is; give one"
    if options.length_ratio is not None and options.input_tokens is None and options.output_tokens is None:
        yield f"--length-ratio {options.length_ratio} needs --input or --output, whose share it is"
    each = options.requests_per_client
    if each is not None and options.concurrency is None:
        yield f"--requests-per-client {each} needs clients: add -c N, or give -n instead"
    if each is not None and options.num_requests is not None:
        yield f"--requests-per-client {each} and -n {options.num_requests} both say how many requests; give one"


def _without_effect(options: LoadOptions) -> Iterator[str]:
    """Yield the given options that have no effect, and what each would need."""
    values = {name: getattr(options, name) for name in OPTIONS}
    given = {name: OPTIONS[name] for name, value in values.items() if value != DEFAULTS[name]}
    workload = options.workload
    for name, option in given.items():
        if option.workloads and workload not in option.workloads:
            cure = "" if (name, workload) == ("cv", "constant") else option.cure
            only = f"--workload {', '.join(option.workloads)} only; --workload is {workload}{cure}"
            yield option.refusal or f"{flag_of(name, option)} {_in_words(values[name])} goes with {only}"
    if "concurrency" in given:
        for name, option in given.items():
            # In sessions a speed-up also divides think times.
            if "times" in option.needs or (name == "speed_up" and not options.has_sessions):
                why = "needs times, and a closed loop (-c) does not use the workload's; leave out one of the two"
                yield f"{flag_of(name, option)} {_in_words(values[name])} {why}"
    if "adapters" not in given and "num_adapters" not in given:
        for name, option in given.items():
            if "adapters" in option.needs:
                why = "needs adapters: add --adapters all, or --num-adapters N"
                yield f"{flag_of(name, option)} {_in_words(values[name])} {why}"


def _in_words(value: object) -> str:
    """Return a value as on the command line."""
    if isinstance(value, tuple):
        return ":".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check_shared_prefix(options: LoadOptions, tokens: int, groups: int) -> None:
    own = 0 if options.workload == "sharegpt" else options.prompt_lengths[1]
    if tokens + own > MOST_TOKENS:
        raise SettingsError(
            f"--shared-prefix {tokens} and prompts of up to {own} tokens after it; at most {MOST_TOKENS} together"
        )
    if groups > MOST_TOKENS:
        raise SettingsError(f"--shared-prefix has {groups} groups; at most {MOST_TOKENS} can be drawn from")


def _check_range(flag: str, low: int, high: int, *, half_open: bool = False) -> None:
    if low < 1:
        raise SettingsError(f"{flag} is {low}:{high}; it must begin at 1 or more")
    if high < low + half_open:
        why = "slora draws below HIGH, so HIGH must be above LOW" if half_open else "HIGH must be LOW or more"
        raise SettingsError(f"{flag} is {low}:{high}, which is empty; {why}")
