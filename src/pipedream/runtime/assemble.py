"""Builds workers from links, stages and optimizers.

What a worker keeps under all programs of a session is made once (`WorkerMaterials`); `build_worker` makes the rest for
one program.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.program import Program
from pipedream.runtime.blueprint import Blueprint
from pipedream.runtime.links import RankLinks, StageSource
from pipedream.runtime.mailbox import Mailbox
from pipedream.runtime.rank_context import RankContext
from pipedream.runtime.recorder import Recorder
from pipedream.runtime.residence import Residence
from pipedream.runtime.results import Results
from pipedream.runtime.stage.part import PassFacts, StageFacts
from pipedream.runtime.stage.stage_module import StageModule
from pipedream.runtime.stage.versions import WeightChoice, WeightStore
from pipedream.runtime.stage_parts import check_parts, make_parts
from pipedream.runtime.stage_passes import StagePasses
from pipedream.runtime.stage_state import StageState
from pipedream.runtime.update.gradients import Gradients
from pipedream.runtime.update.optimizer import Optimizer, make_optimizer
from pipedream.runtime.update.rate_schedule import RateSchedule, StageUpdates
from pipedream.runtime.update.reducer import Reducer
from pipedream.runtime.update.replica import Replica
from pipedream.runtime.update.stepped import LossFactor, MovingAverages, SteppedWeights
from pipedream.runtime.updates import Updates
from pipedream.runtime.worker import Worker


@dataclass(frozen=True)
class StageMaterials:
    """What a stage replica keeps under all programs."""

    source: StageSource
    module: StageModule
    stepped: SteppedWeights
    optimizer: torch.optim.Optimizer
    scheduler: Any
    averages: MovingAverages
    reducer: Reducer
    loss_scale: LossFactor


@dataclass(frozen=True)
class CopyMaterials:
    """What the passes of a stage that copy weights keep under all programs (`StageMaterials`)."""

    module: StageModule
    make_copies: Callable[[Program], WeightStore]


@dataclass(frozen=True)
class WorkerMaterials:
    """What a worker keeps under all programs.

    Attributes:
        on_copies: of the stages whose passes here copy weights.
    """

    links: RankLinks
    stages: dict[int, StageMaterials]
    on_copies: dict[int, CopyMaterials]
    residence: Residence
    recorder: Recorder


def gather_materials(
    blueprint: Blueprint, links: RankLinks, on_copies: dict[int, CopyMaterials], residence: Residence
) -> WorkerMaterials:
    """Returns the materials of a worker."""
    stages = {source.stage: _gather_stage_materials(blueprint, source, residence) for source in links.sources}
    return WorkerMaterials(links, stages, on_copies, residence, blueprint.make_recorder(links.rank, blueprint.device))


def gather_materials_on_copies(
    blueprint: Blueprint, rank: int, find_trained: Callable[[int], dict[str, nn.Parameter]], residence: Residence
) -> dict[int, CopyMaterials]:
    """Returns the materials of the stages whose passes on a rank copy weights; to be called before layers that share a
    parameter are separated.

    Args:
        find_trained: returns the trained parameters of a stage.
    """
    on_copies = {}
    passes = (blueprint.placement.passes_on_copies(rank, forward=forward) for forward in (True, False))
    for stage in sorted({stage for row in passes for stage, _ in row}):
        module = _choose_module(blueprint)(blueprint.stages[stage], dict(find_trained(stage)))
        on_copies[stage] = CopyMaterials(module, residence.copy(rank, stage, module))
    return on_copies


def _gather_stage_materials(blueprint: Blueprint, source: StageSource, residence: Residence) -> StageMaterials:
    stage, replica_group, handles = source.stage, source.replica_group, source.handles
    plan, settings = blueprint.program.plan, blueprint.settings
    module = _choose_module(blueprint)(
        source.layers, source.parameters, division=source.division, replicated=replica_group is not None
    )
    averages = MovingAverages(handles, settings.ema)
    stepped = residence.settle(stage, source.replica, module, handles, averages.tensors)
    optimizer = make_optimizer(settings.optimizer, stepped)
    tied = [name for weights in blueprint.tied if stage in weights.stages for name in weights.names]
    reducer = Reducer()
    if replica_group is not None:
        replica = Replica(handles, averages.tensors, replica_group, plan.replicas[stage], tied)
        reducer = plan.choices.sums.make_reducer(replica)
    return StageMaterials(
        source,
        module,
        stepped,
        optimizer,
        scheduler=None if settings.scheduler is None else settings.scheduler(optimizer),
        averages=averages,
        reducer=reducer,
        loss_scale=settings.make_loss_scale(),
    )


def _choose_module(blueprint: Blueprint) -> Callable[..., StageModule]:
    """Returns what makes a stage of layers and their parameters."""
    settings = blueprint.settings
    return partial(
        StageModule,
        device=blueprint.device,
        seed=settings.seed,
        autocast=settings.autocast,
        compile=settings.compile,
    )


def build_worker(blueprint: Blueprint, materials: WorkerMaterials) -> Worker:
    """Returns the worker of the blueprint's program."""
    program, placement, settings, links = blueprint.program, blueprint.placement, blueprint.settings, materials.links
    shared: dict[object, Any] = {}
    stage_states = {
        stage: _build_stage_state(blueprint, links.rank, shared, row, materials.residence)
        for stage, row in materials.stages.items()
    }
    on_copies = {
        stage: _build_passes_on_copies(blueprint, stage, links.rank, shared, row)
        for stage, row in materials.on_copies.items()
    }
    results = Results(
        links.rank,
        placement,
        links.channels.result_senders,
        links.channels.result_receivers,
        settings.metrics,
        reads_late=blueprint.device.type == "cuda",
        process=links.process,
    )
    materials.recorder.max_queued = (max(program.plan.in_flight) + 2) * len(stage_states)
    mailbox = Mailbox(links.rank, placement, program.channels, links.channels.senders)
    context = RankContext(
        links.rank, links.process, program, blueprint.device, mailbox, results, materials.recorder, links.activity
    )
    return Worker(
        context,
        blueprint.evaluation,
        stage_states,
        stage_states | on_copies,
        links.channels,
        settings.make_scorer(results, program),
        Updates(settings.policy, program, links.everyone, stage_states, links.tied),
    )


def _build_stage_state(
    blueprint: Blueprint, rank: int, shared: dict[object, Any], materials: StageMaterials, residence: Residence
) -> StageState:
    program, module, source = blueprint.program, materials.module, materials.source
    rule, stage, handles, replica_group = program.weights, source.stage, source.handles, source.replica_group
    single = rule.held_until is None or rule.kept_until(stage) is not None
    versions = residence.make_versions(stage, handles, watched=replica_group is not None, single=single)
    optimizer = Optimizer(
        materials.stepped,
        RateSchedule(materials.optimizer, materials.scheduler, StageUpdates.of(program, stage)),
        reducer=materials.reducer,
        averages=materials.averages,
        loss_scale=materials.loss_scale,
        division=module.division,
    )
    choice = WeightChoice(versions, rule)
    facts = StageFacts(
        stage, rank, blueprint.programs, module, shared, versions, choice, versions, optimizer, replica_group
    )
    return StageState(facts, (*source.parts, *make_parts(facts, program)))


def _build_passes_on_copies(
    blueprint: Blueprint, stage: int, rank: int, shared: dict[object, Any], materials: CopyMaterials
) -> StagePasses:
    program, module, loss_scale = blueprint.program, materials.module, blueprint.settings.make_loss_scale()
    weights = materials.make_copies(program)
    facts = PassFacts(stage, rank, blueprint.programs, module, shared, weights, WeightChoice(weights))
    return StagePasses(facts, Gradients(len(module.handles)), loss_scale, make_parts(facts, program))


def check_programs(workers: Sequence[Worker], programs: Sequence[Program]) -> None:
    """Raises a `ScheduleError` before a run if a stage does not fit one of the programs that it will run."""
    for worker in workers:
        for stage_state in worker.stage_states.values():
            optimizer, division = stage_state.optimizer, stage_state.module.division
            check_parts(stage_state.facts)
            if optimizer.reducer.averages_weights and hasattr(optimizer.optimizer, "eval"):
                raise ScheduleError(
                    f"sums={worker.program.plan.choices.sums!r} was asked for with "
                    f"{type(optimizer.optimizer).__name__}, which keeps weights of its own that would not be averaged; "
                    "use another optimizer, or sums='bfloat16'"
                )
            rotates = any(rule.steps_whole_matrices for p in programs for rule in p.updates.compensation)
            division.adapt_optimizer(optimizer.optimizer, rotates=rotates)
            division.watch_memory(worker.recorder.sample_memory)
