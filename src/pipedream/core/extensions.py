"""Finds what extensions offer: the modules of one name in the folders of `pipedream/extensions/`, or of `apps/`.

What may be offered, under the names of their modules:

| module | offers | read by |
| --- | --- | --- |
| `actions` | `ACTIONS`, what a worker does at moves of its program | `runtime.worker` |
| `advice` | to `advise` where memory is short | `workflows.plan` |
| `channel_ends` | to `join_senders` and `join_receivers` of a channel between meshes | `runtime.comm.transport` |
| `compensator` | the `DelayCompensator` of a stage with stale gradients | `runtime.update.compensator` |
| `clipping` | the `Clipping` that decides about updates by the norms of gradients | `runtime.update.decision` |
| `compiler` | to `make_compiler` of layers | `pipeline` |
| `command_NAME` | the command `pipedream NAME` | `apps.cli` |
| `copied_passes` | the memory of passes on copies of shared weights | `simulator`, `verifier`, `workflows.methods` |
| `division` | to `divide_stage` over several ranks | `runtime.session.session` |
| `gradient_sums` | the `TiedGradientSum` of weights that several stages hold | `runtime.updates` |
| `gpu_link` | to `open_senders` and `open_receivers` of channels between two GPUs | `runtime.comm.transport` |
| `layout` | to `make_layout`s of tensors on meshes | `core.plan.ranks` |
| `mesh_groups` | to `connect_meshes` of the ranks of workers | `runtime.comm.connections` |
| `methods` | `METHODS` that need the extension | `schedules.registry`, by `import_methods` |
| `notation` | `SUFFIX` of files of schedules, to `load` and `write` | `schedules.files` |
| `pair_memory` | a `Listener`, for channels between ranks of one machine | `runtime.comm.pairs` |
| `parts` | `PARTS`, what a stage has besides layers, weights and optimizer | `runtime.stage_parts` |
| `planning` | to `compare` plans for the requests that it `takes` | `workflows.plan` |
| `profiling` | to `measure_ranks` of meshes | `workflows.profile` |
| `run_page` of `apps/` | to `write` pages into a run folder | `apps.training.run_folder` |
| `residence` | to `make_residence` of weights and optimizers in the memory of the machine | `runtime.residence` |
| `scaler` | the `LossScaleOptions` of a `grad_scaler` | `pipeline` |
| `sharded_reader` | whether a loader `can_be_sharded`, and a `ShardedLoader` to `open` shares | `runtime.data.reader` |
| `split` | to run `backward_inputs` and `backward_weights`, the halves of a backward | `runtime.backward` |
| `strategy` | `NAMES` for `--strategy`, and to `compare` plans for the requests that it `takes` | `workflows.plan` |
"""

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType

from pipedream.core.errors import PlanError


@cache
def list_offers(name: str, package: str = "pipedream.extensions") -> tuple[ModuleType, ...]:
    """Returns the module of this name of each extension that has one, in the order of the folders' names."""
    names = [f"{folder}.{name}" for folder, is_package in _list_modules(package) if is_package]
    return tuple(import_module(module) for module in names if find_spec(module) is not None)


def find_offer(name: str, need: str) -> ModuleType:
    """Returns the module of this name of an extension. Raises a `PlanError` if none has one; `need` says for what."""
    for module in list_offers(name):
        return module
    raise PlanError(f"{need}, for which an extension offers {name!r}, and none here does; add it, or leave that out")


def import_folder(package: str) -> list[ModuleType]:
    """Returns the modules of a package, in the order of their names; none if the package was left out."""
    return [import_module(name) for name, _ in _list_modules(package)]


def import_methods() -> list[ModuleType]:
    """Returns the modules that declare methods; those of extensions last."""
    folders = "pipedream.schedules.synchronous", "pipedream.schedules.asynchronous", "pipedream.extensions.methods"
    return [module for folder in folders for module in import_folder(folder)] + [*list_offers("methods")]


def _list_modules(package: str) -> Iterator[tuple[str, bool]]:
    """Yields the name of each module of a package, and whether it is a package itself."""
    if find_spec(package) is not None:
        for module in iter_modules(import_module(package).__path__, f"{package}."):
            yield module.name, module.ispkg
