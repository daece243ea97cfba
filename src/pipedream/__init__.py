"""Pipeline-parallel training of PyTorch models: profile, plan, simulate, run.

    profile = pipedream.profile(model, sample)
    plan = pipedream.plan(profile, pipedream.Cluster.flat(4))
    print(pipedream.simulate(plan, schedule="1f1b", microbatches=16))

A name is resolved on first use, so that `import pipedream` does not load torch, and reading a plan does not either.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import schedules
    from .api import plan, profile, simulate
    from .core.cluster import Cluster
    from .core.errors import PipelineError
    from .core.op import Op
    from .core.phase import Phase
    from .core.placement import Placement
    from .core.plan import Plan, Stage
    from .core.profile import Profile
    from .core.program import Program
    from .core.schedule import Schedule
    from .core.timeline import Timeline
    from .emulating import emulate
    from .pipeline import Done, Pipeline
    from .recipe import Recipe
    from .training import run

    __version__: str

__all__ = [
    "Cluster",
    "Done",
    "Op",
    "Phase",
    "Pipeline",
    "PipelineError",
    "Placement",
    "Plan",
    "Profile",
    "Program",
    "Recipe",
    "Schedule",
    "Stage",
    "Timeline",
    "__version__",
    "emulate",
    "plan",
    "profile",
    "run",
    "schedules",
    "simulate",
]

_HOMES = {
    "Cluster": "core.cluster",
    "Done": "pipeline",
    "Op": "core.op",
    "Phase": "core.phase",
    "Pipeline": "pipeline",
    "PipelineError": "core.errors",
    "Placement": "core.placement",
    "Plan": "core.plan",
    "Profile": "core.profile",
    "Program": "core.program",
    "Recipe": "recipe",
    "Schedule": "core.schedule",
    "Stage": "core.plan",
    "Timeline": "core.timeline",
    "emulate": "emulating",
    "plan": "api",
    "profile": "api",
    "run": "training",
    "simulate": "api",
}


def __getattr__(name: str) -> object:
    value: object
    if name == "__version__":
        value = version("pipedream")
    elif name == "schedules":
        value = import_module(".schedules", __name__)
    elif name in _HOMES:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
