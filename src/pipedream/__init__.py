"""Pipeline-parallel training of PyTorch models: profile, plan, simulate, run.

    profile = pipedream.profile(model, sample)
    plan = pipedream.plan(profile, pipedream.Cluster.flat(4))
    print(pipedream.simulate(plan, schedule="1f1b", microbatches=16))

Names are imported on first use, so `import pipedream` does not load torch, and neither does planning or simulating.
"""

import sys as _sys
from contextlib import nullcontext as _nullcontext
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from pipedream._version import __version__ as __version__
from pipedream.core.garbage import pause_collection as _pause_collection
from pipedream.core.tabular import Tabular as _Tabular

if TYPE_CHECKING:
    from pipedream import (
        callbacks as callbacks,
        capture as capture,
        experts as experts,
        loggers as loggers,
        metrics as metrics,
        schedules as schedules,
        testing as testing,
    )
    from pipedream.apps.emulate.emulate import emulate as emulate
    from pipedream.apps.training.recipe import Recipe as Recipe
    from pipedream.apps.training.train import run as run
    from pipedream.core import errors as errors
    from pipedream.core.errors import PipelineError as PipelineError
    from pipedream.core.hardware.cluster import Cluster as Cluster, Level as Level
    from pipedream.core.model.graph import Layer as Layer, LayerGraph as LayerGraph
    from pipedream.core.model.profile import LayerProfile as LayerProfile, Profile as Profile
    from pipedream.core.plan.plan import Plan as Plan
    from pipedream.core.plan.ranks import Mesh as Mesh
    from pipedream.core.plan.stage import Stage as Stage
    from pipedream.core.schedule.lowering import lower as lower
    from pipedream.core.schedule.program import Program as Program
    from pipedream.core.schedule.schedule import Schedule as Schedule
    from pipedream.core.schedule.timeline import Timeline as Timeline
    from pipedream.extensions.meshes.layout import Layout as Layout
    from pipedream.extensions.meshes.layouts import (
        Operators as Operators,
        lay_out as lay_out,
        operators as operators,
        partition as partition,
        register_operator as register_operator,
    )
    from pipedream.pipeline import Pipeline as Pipeline
    from pipedream.runtime.results import Done as Done
    from pipedream.services.phases.phases import Phase as Phase
    from pipedream.tensors.auxiliary_loss import (
        add_auxiliary_loss as add_auxiliary_loss,
        auxiliary_loss_scale as auxiliary_loss_scale,
    )
    from pipedream.verifier import verify as verify
    from pipedream.workflows.plan import plan as plan
    from pipedream.workflows.profile import profile as profile
    from pipedream.workflows.simulate import simulate as simulate

_HOMES = {
    "Cluster": "core.hardware.cluster",
    "Done": "runtime.results",
    "Layer": "core.model.graph",
    "LayerGraph": "core.model.graph",
    "LayerProfile": "core.model.profile",
    "Layout": "extensions.meshes.layout",
    "Level": "core.hardware.cluster",
    "Mesh": "core.plan.ranks",
    "Operators": "extensions.meshes.layouts",
    "Phase": "services.phases.phases",
    "Pipeline": "pipeline",
    "PipelineError": "core.errors",
    "Plan": "core.plan.plan",
    "Profile": "core.model.profile",
    "Program": "core.schedule.program",
    "Recipe": "apps.training.recipe",
    "Schedule": "core.schedule.schedule",
    "Stage": "core.plan.stage",
    "Timeline": "core.schedule.timeline",
    "add_auxiliary_loss": "tensors.auxiliary_loss",
    "auxiliary_loss_scale": "tensors.auxiliary_loss",
    "emulate": "apps.emulate.emulate",
    "errors": "core",
    "lay_out": "extensions.meshes.layouts",
    "lower": "core.schedule.lowering",
    "operators": "extensions.meshes.layouts",
    "partition": "extensions.meshes.layouts",
    "plan": "workflows.plan",
    "profile": "workflows.profile",
    "register_operator": "extensions.meshes.layouts",
    "run": "apps.training.train",
    "simulate": "workflows.simulate",
    "verify": "verifier",
}
"""Name -> the module that defines it."""

_MODULES = ("callbacks", "capture", "experts", "loggers", "metrics", "schedules", "testing")

_Tabular.drawing = staticmethod(lambda: _import_module("pipedream.apps.report.notebook"))


def __getattr__(name: str) -> object:
    if name not in _HOMES and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = f"{__name__}.{_HOMES.get(name, name)}"
    with _nullcontext() if home in _sys.modules else _pause_collection(age=True):
        module = _import_module(home)
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return ["__version__", *_HOMES, *_MODULES]


if not TYPE_CHECKING:  # type checkers read the aliases above
    __all__ = __dir__()
