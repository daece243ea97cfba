"""The only list of planning options, each with its default and its meaning."""

from dataclasses import KW_ONLY, dataclass

from pipedream.core.errors import PlanError
from pipedream.core.extensions import list_offers
from pipedream.core.flags import Panel
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.choices import Chooser, option_of_choice
from pipedream.core.plan.depth import read_depth

AUTO = "auto"
"""Lets the planner choose: a mesh for each stage, or the method."""

NO_MESH = "none"
"""The mesh '' in words: each worker is a single rank."""

_STRATEGIES = ("simulate", "search")  # and those of extensions

METHOD_NAME = "NAME[OPTION=VALUE,...]|FILE"
METHOD_HELP = "The method: a name from 'pipedream show', a schedule in PyTorch's notation (FILE.csv), or FILE.py"


def _read_cuts(text: str) -> tuple[int | str, ...]:
    return tuple(int(cut) if cut.isdecimal() else cut for cut in text.split(",") if cut)


@dataclass(frozen=True)
class PlanRequest(Chooser):
    """What to plan: the arguments of `pipedream.plan` besides the profile.

    Attributes:
        cluster: workers and links; by default those of this run. If its processes are on several machines (torchrun,
            srun), the links are measured for some seconds, and rank 0 prints the result; every rank calls it.
        schedule: its weight versions count against the memory; a file in PyTorch's notation determines the stages too.
        in_flight: counts may be a tuple.
        strategy: 'simulate' compares finalists of the shapes 'any' and 'pipeline', up to 128 workers. For '2bw' see
            `pipedream.extensions.two_bw.strategy`.
        shape: 'any' takes the fastest of one worker, data parallelism and pipelines; 'pipeline' at least two stages;
            'straight' one stage for each worker; 'data-parallel' one stage; replica counts: '2-1' or (2, 1).
        cuts: of a module, the first layer counts. Each stage has one worker unless `shape` gives counts.
        all_workers: 'any' and 'pipeline' must use every worker.
        mesh: for a shape that gives counts also one for each stage; such stages begin where those of single ranks
            would. Seconds and bytes are those of one rank; the profile must know the meshes (``profile(meshes=...)``).
            'auto' chooses one for each stage, or none, together with cuts and replicas (docs/meshes.md).

    Raises:
        PlanError: the strategy or a choice is not known, or the cluster is no Cluster.
    """

    cluster: Cluster | None = None
    _: KW_ONLY
    schedule: str = Panel.METHOD.option(
        "pipedream", f"{METHOD_HELP}; 'auto' chooses the fastest by simulation.", metavar=METHOD_NAME
    )
    microbatches: int | None = Panel.METHOD.number(
        None, "Microbatches per minibatch.", metavar="M", unset="the plan's or the method's own number"
    )
    in_flight: str | tuple[int, ...] = Panel.METHOD.option(
        "noam",
        "Depth, the microbatches in flight at each stage: as in the paper (noam), enough to hide messages (full), "
        "the deepest that fits the memory (auto), or a count for each stage, e.g. 3,2,1.",
        metavar="noam|full|auto|N,N,...",
        read=read_depth,
    )
    chunks: int | None = Panel.METHOD.number(
        None, "Stages per worker, for methods that interleave.", metavar="V", unset="the method's own number"
    )
    allow_asynchronous: bool = Panel.METHOD.option(
        False, "Let --schedule auto also choose methods with stale gradients."
    )
    allow_approximate: bool = Panel.METHOD.option(
        False, "Also plan with encoded messages and approximate sums, and choose them where they save time."
    )
    strategy: str = Panel.METHOD.option(
        "simulate",
        "How to search: the fastest in simulation of several searches' plans (simulate), the plan with the fastest "
        "slowest stage (search), or by PipeDream-2BW's planner and cost model, where all stages have the same replica "
        "count (2bw).",
        metavar="simulate|search|2bw",
    )
    sums: str = option_of_choice("sums", "full", panel=Panel.METHOD)
    shape: str | tuple[int, ...] = "any"
    cuts: tuple[int | str, ...] | None = Panel.SHAPE.option(
        None,
        "Layers at which a new stage begins, by index or by the name of a layer or module, e.g. 3,model.layers.4; "
        "'pipedream layers' lists them.",
        metavar="LAYER,LAYER,...",
        kind=str,
        read=_read_cuts,
    )
    update_delay: int = Panel.SHAPE.option(
        0, "1 lets replicated stages run their next forward before they update.", metavar="0|1", least=0, most=1
    )
    all_workers: bool = False
    recompute: str = option_of_choice("recompute", "never", panel=Panel.SHAPE)
    messages: str | None = option_of_choice("messages", None, unset="full", panel=Panel.METHOD)
    activations: str = option_of_choice("activations", "", unset="in the worker's own memory", panel=Panel.SHAPE)
    optimizer_state: str | None = option_of_choice("optimizer_state", None, unset="device", panel=Panel.METHOD)
    mesh: str = Panel.SHAPE.option(
        "",
        "Mesh of the ranks of every worker, e.g. model:2, or one for each stage, e.g. data:2/model:2/-, which the "
        "profile must know; auto chooses among those that it knows, for each stage. With a mesh, --workers counts "
        "ranks and --config counts workers.",
        metavar="auto|none|NAME:RANKS[,...][/...]",
        unset="none, one rank",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", "" if self.mesh == NO_MESH else self.mesh)
        self.check_choices()
        if self.strategy not in _STRATEGIES:
            names = [*_STRATEGIES, *(name for offer in list_offers("strategy") for name in offer.NAMES)]
            if self.strategy not in names:
                listed = f"{', '.join(names[:-1])} or {names[-1]}"
                raise PlanError(
                    f"strategy {self.strategy!r} is not known, and no extension here has it; write {listed}"
                )
        if self.cluster is not None and not isinstance(self.cluster, Cluster):
            raise PlanError(
                f"{self.cluster!r} was given as the cluster; give a Cluster, such as pipedream.Cluster.flat(4)"
            )

    @property
    def workers_and_links(self) -> Cluster:
        """The cluster; known once planning has begun."""
        assert self.cluster is not None, "planning fills it in"
        return self.cluster
