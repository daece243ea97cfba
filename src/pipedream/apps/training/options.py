"""What one run of a recipe chooses: the options of `pipedream.run` and of the command `pipedream train`."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipedream.core.errors import PipelineError
from pipedream.core.flags import Panel, flag_of, number, option_of
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.ranks import meshes_of, ranks_of
from pipedream.core.schedule.delay_compensation import compensations
from pipedream.options import ChoiceOptions, MethodOptions, ModelOptions, PipelineOptions
from pipedream.plan_request import AUTO, PlanRequest
from pipedream.planner import SHAPES, parse_counts
from pipedream.schedules import is_schedule_file, load_schedule
from pipedream.services.failure.simulated_fault import FORM as FAULT_FORM, SimulatedFault


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(ChoiceOptions, MethodOptions):
    """Options of one run of a recipe: those of `pipedream.run` and of the command `pipedream train`.

    A resumed run takes schedule, compensation, phases, plan, microbatches and seed from its checkpoint by default;
    otherwise phases, compensation and epochs come from the recipe.

    Attributes:
        phases: also a list, as in `Pipeline`. The plan is made for the first phase that does not flush.
        compensation: as in `Pipeline`; the recipe's applies only to methods that do not flush.
        workers: under torchrun the number of processes. With a mesh, ranks are counted.
        plan: a finished plan; by default the model is profiled and planned here.
        shape: what to plan, see `pipedream.plan`; 'pipeline' and 'any' use all workers.
        in_flight: counts may be a tuple.
        layout: in place of the recipe's rules, whose names stay.
        compile: False leaves it to the recipe.
        epochs, minibatches: since the start of training.
        evaluate_every: each evaluation drains the pipeline.
        checkpoint_every: each checkpoint drains the pipeline; None saves whenever an evaluation drains it; 'auto'
            measures what one costs. It is not the default: where an asynchronous method is drained changes what it does
            next, so two runs would differ. They are in the run folder (`training.run_folder.CHECKPOINTS`).
        resume: may be a URL; another number of workers gets a new plan. After a restart by the launcher the run
            continues from its newest checkpoint without this. With an empty folder `out`, the same options start a run
            and continue it.
        cluster: workers and links; by default this machine, or if the processes are on several the links are measured.
        memory_bytes: memory of each worker; by default the cluster's, or what the machines have.
        simulate_fault: a failure on purpose, as 'rank=2,after=100,kind=kill'; it does not come back after a restart.
        quiet: print nothing.
    """

    schedule: str | None = option_of(PlanRequest, "schedule", default=None, unset="the plan's own, or pipedream")
    phases: str | Sequence[Any] | None = option_of(ModelOptions, "phases")
    compensation: Any = option_of(ModelOptions, "compensation")
    workers: int | None = number(None, "Number of local worker processes.", unset="the plan's, or 2")
    plan: Plan | None = None
    shape: str | tuple[int, ...] = "pipeline"
    update_delay: int = option_of(PlanRequest, "update_delay")
    recompute: bool = Panel.SHAPE.option(
        False,
        "Make every stage keep only its input and repeat the forward before the backward, like 'pipedream plan "
        "--recompute always'. Without this flag the plan decides.",
    )
    in_flight: str | tuple[int, ...] = option_of(PlanRequest, "in_flight")
    chunks: int | None = option_of(PlanRequest, "chunks")
    mesh: str = option_of(
        PlanRequest,
        "mesh",
        help="Mesh of the ranks of every worker, e.g. model:2, or one for each stage, e.g. data:2/model:2/-; auto "
        "plans meshes with stages and replicas. With a mesh, --workers counts ranks and --config counts workers.",
        panel=Panel.MESH,
    )
    layout: str | None = Panel.MESH.option(
        None,
        "Tensor dimensions to shard over each mesh dimension, e.g. d_ff:model.",
        metavar="TENSOR:MESH[,...]",
        unset="the recipe's",
    )
    shard_weights: str | None = Panel.MESH.option(
        None,
        "Dimension of the mesh over which weights, gradients and optimizer state are sharded (ZeRO-3).",
        metavar="MESH",
        unset="the recipe's",
    )
    allow_asynchronous: bool = option_of(PlanRequest, "allow_asynchronous")
    compile: bool = option_of(ModelOptions, "compile")
    epochs: int | None = Panel.RUN.number(None, "Epochs to train.", unset="the recipe's")
    minibatches: int | None = Panel.RUN.number(None, "Stop after this many minibatches.", unset="no limit")
    evaluate_every: int = Panel.RUN.option(
        1, "Epochs between evaluations; 0: only at the end.", metavar="EPOCHS", least=0
    )
    checkpoint_every: int | str | None = Panel.RUN.option(
        None,
        "Minibatches between checkpoints; 0: no checkpoints; auto: so many that they cost at most 2% of the time.",
        metavar="MINIBATCHES|auto",
        unset="at each evaluation",
        kind=str,
        read=lambda text: int(text) if text.isdecimal() else text,
    )
    keep: int = Panel.RUN.number(2, "Number of checkpoints to keep.")
    resume: str | os.PathLike[str] | None = Panel.RUN.option(
        None,
        "Continue a run: its run folder, or one of its checkpoints. The folder of --out may still be empty.",
        metavar="DIR",
    )
    cluster: Cluster | None = None
    memory_bytes: int | None = None
    weights: str | None = option_of(PipelineOptions, "weights")
    out: str | os.PathLike[str] | None = Panel.RUN.option(
        None,
        "Run folder; or a URL such as s3://bucket/run, to which checkpoints and, at the end, all files go.",
        metavar="DIR",
        unset="a new one in runs/",
    )
    logs: tuple[str, ...] = Panel.RUN.option(
        (),
        "Also log to the run folder, or to a service by its own package; repeatable.",
        "--logger",
        "--log",
        metavar="csv|tensorboard|wandb|mlflow",
        kind=list[str],
        read=tuple,
    )
    verbose: bool = Panel.RUN.option(False, "Print all layers of the profile, not only the slowest five.")
    simulate_fault: str | None = Panel.FAILURES.option(
        None,
        "Let a rank fail on purpose, to see a recovery: it is killed, hangs, or has half of the time from there on.",
        metavar=FAULT_FORM,
        unset="none",
    )
    quiet: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mesh", "" if self.mesh == "none" else self.mesh)
        compensations(() if self.compensation is None else self.compensation)
        bounds = {field.name: flag.least for field in dataclasses.fields(self) if (flag := flag_of(field))}
        for name, lowest in (bounds | {"memory_bytes": 1}).items():
            value = getattr(self, name)
            if lowest is None or value is None or name == "stuck_after_s":
                continue
            if not (isinstance(value, int) and value >= lowest):
                raise PipelineError(f"{name}={value!r} was asked for; give a whole number from {lowest} on")
        if self.simulate_fault is not None:
            SimulatedFault.parse(self.simulate_fault)
        every = self.checkpoint_every
        if not (every in (None, AUTO) or (type(every) is int and every >= 0)):
            raise PipelineError(f"checkpoint_every={every!r} was asked for; give 'auto' or a whole number from 0 on")

    @property
    def single_mesh(self) -> str:
        """The mesh of every worker, or one for each stage; '' if the planner chooses."""
        return "" if self.mesh == AUTO else self.mesh

    def count_ranks(self) -> int | None:
        """Returns the ranks that the plan, shape, schedule's file or cluster asks for; None if they leave it open."""
        if self.plan is not None:
            return self.plan.ranks
        if self.shape not in SHAPES and self.mesh != AUTO:  # which leaves open how many ranks the workers have
            return ranks_of(self.mesh, parse_counts(self.shape))
        if self.schedule is not None and is_schedule_file(self.schedule):
            placement = load_schedule(self.schedule).placement
            return sum(mesh.size for mesh in placement.meshes(meshes_of(self.single_mesh, placement.stages)))
        return None if self.cluster is None else self.cluster.workers

    @property
    def plan_settings(self) -> dict[str, Any]:
        """The settings that a finished plan fixes. A resumed run that changes one is planned again."""
        shape = None if self.shape == TrainingOptions.shape else self.shape
        settings = {"shape": shape, "update_delay": self.update_delay, "chunks": self.chunks, "mesh": self.mesh}
        return settings | {"cluster": self.cluster, "memory": self.memory_bytes}
