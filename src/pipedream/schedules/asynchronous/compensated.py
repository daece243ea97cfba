"""Published methods that add a compensation to the order and weights of another method.

For other pairs give ``schedule=..., compensation=...``.
"""

from pipedream.schedules import kit
from pipedream.schedules.asynchronous.pb_lwp import predicting
from pipedream.schedules.asynchronous.pipedream import STASHING, stashing
from pipedream.schedules.asynchronous.pipelined_backprop import ONE_SET
from pipedream.schedules.asynchronous.two_bw import double_buffered

RESCHEDULED_FOR = 7_000
"""K of `pipedream_lr`, in updates: 7 times 1,000 in the code released with Nesterov-async."""


def nesterov_async(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns PipeDream with asynchronous Nesterov momentum, for SGD.

    Ajanthan et al., Nesterov Method for Asynchronous Pipeline Parallel Optimization, ICML 2025. The paper's runs are
    plain ``pipedream`` with ``partial(torch.optim.NAdam, lr=3e-4, betas=(0.99, 0.999), weight_decay=0.01,
    decoupled_weight_decay=True)``, whose long momentum makes stale gradients useful.
    """
    return stashing("nesterov_async", plan, microbatches).with_compensation("nesterov")


def ftpipe_msnag(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns PipeDream whose forwards and backwards read weights predicted by multi-step Nesterov, for SGD.

    FTPipe (Eliad et al., ATC 2021), ``msnag`` with weight stashing, at each stage's own staleness; the same as spike
    compensation (Kosson et al., MLSys 2021) of the stored weights.
    """
    return stashing("ftpipe_msnag", plan, microbatches).with_compensation("spike")


def ftpipe_ga(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns PipeDream with gap-aware gradients, for any optimizer.

    Barkai et al., ICLR 2020, as FTPipe (ATC 2021) uses it with weight stashing.
    """
    return stashing("ftpipe_ga", plan, microbatches).with_compensation("gap_aware")


def pipedream_lr(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns PipeDream with PipeMare's rescheduled learning rate T1, for any optimizer.

    Yang et al., PipeMare, MLSys 2021; later comparisons use this name. K is 7,000 updates, or that of
    ``compensation="t1:K"``.
    """
    return stashing("pipedream_lr", plan, microbatches).with_compensation(f"t1:{RESCHEDULED_FOR}")


def one_step_ef(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns PipeDream-2BW with error feedback of strength 1, for any optimizer.

    One-Step Gradient Delay, arXiv 2606.30634, ICML 2026.
    """
    return double_buffered("one_step_ef", plan, microbatches).with_compensation("error_feedback:1")


def basis_rotation(
    plan: kit.Plan, microbatches: int | None = None, *, geometry: str = "two_sided", estimate: str = "second_moment"
) -> kit.Schedule:
    """Returns PipeDream with steps in the eigenbasis of the gradients, for the Adam family.

    Jung, Shin and Lee, Mitigating Staleness in Asynchronous Pipeline Parallelism via Basis Rotation, ICML 2026. Its
    options are those of the compensation.
    """
    rotation = f"basis_rotation:{geometry}:{estimate}"
    return stashing("basis_rotation", plan, microbatches).with_compensation(rotation)


def pb_lwp_sc(
    plan: kit.Plan,
    microbatches: int | None = None,
    *,
    by: str = kit.VELOCITY,
    scale: float = 1.0,
    backward_rule: str = "graph",
) -> kit.Schedule:
    """Returns pipelined backpropagation with linear weight prediction and spike compensation, for SGD.

    Kosson et al., Pipelined Backpropagation at Scale, MLSys 2021, section 3.3: LWP^v_D + SC_D, the paper's best.
    """
    return predicting("pb_lwp_sc", plan, microbatches, by, scale, backward_rule).with_compensation("spike")


METHODS = (
    kit.Method(
        nesterov_async,
        since=2025,
        compensates=True,
        properties=STASHING,
        choose="With SGD and PipeDream's differing staleness per stage, when only the momentum may change: it looks "
        "one update ahead at every stage and costs no memory. Use the paper's learning rate times 1 - m.",
    ),
    kit.Method(
        ftpipe_msnag,
        since=2021,
        compensates=True,
        properties=STASHING,
        choose="With SGD with momentum: each stage looks ahead by its own staleness, at no cost in memory.",
    ),
    kit.Method(
        ftpipe_ga,
        since=2021,
        compensates=True,
        properties=STASHING,
        choose="When weights move by very different amounts before a stale gradient arrives: the further a weight "
        "moved, the less its gradient counts. One more tensor per weight, the moving average of squared steps.",
    ),
    kit.Method(
        pipedream_lr,
        since=2025,
        compensates=True,
        properties=STASHING,
        choose="When a run diverges early at the learning rate that is right for one worker: stale stages start at a "
        "fraction of it. K is about the length of the warm-up or of the first decay.",
    ),
    kit.Method(
        one_step_ef,
        since=2026,
        compensates=True,
        properties=kit.MethodProperties(flushes=False, uses_depth=True),
        choose="With AdamW or Muon on 2BW's two weight sets: it recovers most of what one update of staleness costs. "
        "One more tensor per weight, the last update.",
    ),
    kit.Method(
        basis_rotation,
        since=2026,
        compensates=True,
        properties=STASHING,
        choose="With Adam and many stages. It keeps four square matrices per weight, "
        "`basis_rotation[geometry=one_sided,estimate=first_moment]` one.",
    ),
    kit.Method(
        pb_lwp_sc,
        since=2021,
        compensates=True,
        properties=ONE_SET,
        choose="With pipelined_backprop and SGD with momentum: its paper's best. The prediction helps the forward, the "
        "spike compensation the stale gradient.",
    ),
)
