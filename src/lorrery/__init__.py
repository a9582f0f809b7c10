"""A working model of a multi-tenant LoRA inference cluster that needs no GPU.

    import lorrery

    result = lorrery.simulate(workload={"rate": 20, "duration": 600, "adapters": "all"}, workers=4)
    print(result.summary.from_intended.ttft_ms.p99, result.columns.e2e_seconds.mean())

docs/simulator.md documents what is exported here, docs/gateways.md `engines`; each name is imported when it is first
used, so that a service or a command pays for nothing that it does not need.

The rooms on a request's way lie at the top of the repository, and links beside this file make them parts of this one
package; the others lie here. A wheel holds all as folders. docs/architecture.md says what each is for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lorrery.loadgen.options import LoadOptions
    from lorrery.loadgen.workload.arrays import Requests
    from lorrery.service.errors import LorreryError, SettingsError
    from lorrery.service.installed import VERSION as __version__  # noqa: N811  the name that Python has for it
    from lorrery.service.settings.cluster import Settings
    from lorrery.simulator.arena.arena import compare
    from lorrery.simulator.arena.comparison import Comparison
    from lorrery.simulator.counterfactual import Counterfactual, counterfactual
    from lorrery.simulator.interface import simulate
    from lorrery.simulator.plan.options import Claim
    from lorrery.simulator.plan.plan import Plan, plan
    from lorrery.simulator.result import RequestColumns, SimulationResult
    from lorrery.simulator.virtual_cluster import Observation, VirtualCluster
    from lorrery.testing import engines
    from lorrery.view.reports.report import report

__all__ = [
    "Claim",
    "Comparison",
    "Counterfactual",
    "LoadOptions",
    "LorreryError",
    "Observation",
    "Plan",
    "RequestColumns",
    "Requests",
    "Settings",
    "SettingsError",
    "SimulationResult",
    "VirtualCluster",
    "__version__",
    "compare",
    "counterfactual",
    "engines",
    "plan",
    "report",
    "simulate",
]

_HOMES = {
    "Claim": ("simulator.plan.options", "Claim"),
    "Comparison": ("simulator.arena.comparison", "Comparison"),
    "Counterfactual": ("simulator.counterfactual", "Counterfactual"),
    "LoadOptions": ("loadgen.options", "LoadOptions"),
    "LorreryError": ("service.errors", "LorreryError"),
    "Observation": ("simulator.virtual_cluster", "Observation"),
    "Plan": ("simulator.plan.plan", "Plan"),
    "RequestColumns": ("simulator.result", "RequestColumns"),
    "Requests": ("loadgen.workload.arrays", "Requests"),
    "Settings": ("service.settings.cluster", "Settings"),
    "SettingsError": ("service.errors", "SettingsError"),
    "SimulationResult": ("simulator.result", "SimulationResult"),
    "VirtualCluster": ("simulator.virtual_cluster", "VirtualCluster"),
    "__version__": ("service.installed", "VERSION"),
    "compare": ("simulator.arena.arena", "compare"),
    "counterfactual": ("simulator.counterfactual", "counterfactual"),
    "engines": ("testing", "engines"),
    "plan": ("simulator.plan.plan", "plan"),
    "report": ("view.reports.report", "report"),
    "simulate": ("simulator.interface", "simulate"),
}
"""Exported name -> the module of this package that defines it, and its name there."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'lorrery' has no attribute {name!r}")
    module, own_name = _HOMES[name]
    value: object = getattr(import_module(f"lorrery.{module}"), own_name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
