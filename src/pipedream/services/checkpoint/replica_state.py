"""The state in a checkpoint that differs between replicas: ``replica/R/KIND/NAME``, and `SavedStage.replicas`.

| KIND | saved by |
| --- | --- |
| `error` | each replica: what its gradients, or its changes, lack (PowerSGD, SparseLoCo) |
| `outer`, `velocity`, `late` | each replica whose averages overlap with updates |
| `weights`, `ema` | each replica: its own between two averages (`SumMethod.averages_weights`) |
| `optimizer`, `compensation` | each replica but the first, whose state has its usual names |

State that replicas have in common, besides weights and averages, is ``factor/NAME`` and ``velocity/NAME``.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from pipedream.core.checkpoint import Checkpoint, SavedStage
from pipedream.runtime.update.optimizer import Optimizer
from pipedream.services.checkpoint import optimizer_state

_log = logging.getLogger("pipedream")

_STEP_KINDS = ("optimizer", "compensation")


def collect_tensors(optimizer: Optimizer, replica: int) -> dict[str, torch.Tensor]:
    """Returns the tensors of this replica alone; at the first replica, also those that all have in common."""
    local = optimizer.reducer.local_tensors()
    if replica and optimizer.reducer.averages_weights:
        steps = optimizer_state.collect_tensors(optimizer)
        local |= {name: tensor for name, tensor in steps.items() if name.partition("/")[0] in _STEP_KINDS}
    common = {} if replica else optimizer.reducer.common_tensors()
    return {_add_prefix(replica, name): tensor for name, tensor in local.items()} | common


def find_tensors(names: Iterable[str], optimizer: Optimizer, replica: int | None) -> Iterator[str]:
    """Yields those names of a checkpoint's tensors that `restore` needs."""
    common, prefix = optimizer.reducer.common_tensors(), _add_prefix(replica, "")
    for name in names:
        is_own = replica is not None and name.startswith(prefix)
        kind, _, rest = (name.removeprefix(prefix) if is_own else name).partition("/")
        is_step = kind in _STEP_KINDS
        owner = rest.rpartition("/")[0] if is_step else rest
        if name in common or (owner in optimizer.named and (is_own or is_step or (kind == "ema" and optimizer.ema))):
            yield name


def restore(
    optimizer: Optimizer,
    stages: Sequence[SavedStage],
    tensors: Mapping[str, torch.Tensor],
    *,
    stage: int | None,
    replica: tuple[int, int] | None,
) -> None:
    """Restores the state of a stage's optimizer, as `optimizer_state.restore` does, and that of its agreement.

    Args:
        replica: (stage, replica) in the checkpoint; None if it has other replicas, so that only their common state is
            restored.
    """
    local: dict[str, torch.Tensor] = {}
    if replica is not None:
        saved_stage, number = replica
        local = {n.removeprefix(p): t for p in [_add_prefix(number, "")] for n, t in tensors.items() if n.startswith(p)}
        if number and stages[saved_stage].replicas:
            stages = [*stages[:saved_stage], stages[saved_stage].replicas[number - 1], *stages[saved_stage + 1 :]]
    steps = {name: tensor for name, tensor in local.items() if name.partition("/")[0] in _STEP_KINDS}
    optimizer_state.restore(optimizer, stages, {**tensors, **steps}, stage=stage)
    for name in steps:
        del local[name]
    optimizer.reducer.load(local, tensors, stages[replica[0]].since_average if replica is not None else 0)


def warn_of_other_replicas(manifest: Checkpoint, *, same: bool, rank: int) -> None:
    """Warns at rank 0 about what a run with other replicas, or other sums, does not take from a checkpoint."""
    if not same and any(name.startswith("replica/") for name in manifest.tensors) and rank == 0:
        _log.warning(
            "the checkpoint's replicas (plan %s, sums=%r) are not those of this run: all continue from the weights "
            "that they had in common, with the optimizer state of the first replica",
            manifest.plan.config,
            str(manifest.plan.choices.sums),
        )


def strip_replica(name: str) -> str:
    """Returns a tensor's name without its replica."""
    return name.split("/", 2)[2] if name.startswith("replica/") else name


def _add_prefix(replica: int | None, name: str) -> str:
    return f"replica/{replica}/{name}"
