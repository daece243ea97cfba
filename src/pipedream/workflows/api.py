"""The verbs: profile(), plan(), simulate(). They wire the wings and decide nothing.

On several processes `profile` and `plan` run on rank 0, and all ranks get its answer: two ranks that
measure at the same time would disturb each other, and would disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipedream import planner, schedules
from pipedream import profiler as profiling
from pipedream import simulator as clock
from pipedream.capture import Captured, capture, find_layers, stand_ins, untouched
from pipedream.core.errors import PlanError, ProfileError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.hardware.devices import Device
from pipedream.core.model.graph_txt import GraphText
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.timeline import Timeline
from pipedream.runtime.comm import process_group as process_group
from pipedream.runtime.comm.values import to_device
from pipedream.verifier import verify
from pipedream.workflows import layouts as laying
from pipedream.workflows.methods import (
    asked_of,
    for_method,
    methods_of,
    occupancy_of,
    plan_of_file,
    score,
    versions_of,
)

__all__ = ["choose", "classic", "layers_of", "plan", "profile", "simulate", "simulate_program"]


def profile(
    model: Any,
    sample: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Callable[[list[tuple[str, Any]]], Any] | None = None,
    device: str = "cpu",
    as_device: str | Device | None = None,
    dtype: Any = None,
    warmup: int = 3,
    runs: int = 10,
    autocast: Any = None,
    seed: int = 0,
) -> Profile:
    """Measures seconds and bytes of each layer of a model on a sample minibatch.

    On the device 'meta' nothing is computed and nothing allocated, so that the model may be larger than the machine and
    be on the meta device itself: bytes are those of stand-ins without numbers, seconds follow from flops and bytes by
    the roofline of `as_device`. The notes of the profile say what was assumed.

    Args:
        model: a chain of modules, see `pipedream.capture`.
        sample: the model's input for one minibatch; a tuple for several inputs.
        loss: from the model's output to a scalar; its time is charged to the last stage.
        optimizer: factory from named parameters to an optimizer; its update time and state are measured.
        device: where to measure: 'cpu', 'cuda' or 'cuda:N'; 'meta': nowhere.
        as_device: with 'meta', the device whose seconds are predicted: a Device, the name of one in
            `pipedream.core.devices` ('A100-80GB'), or 'here', what this machine was measured to do (the default).
        dtype: with 'meta', of all floating-point tensors; None: their own.
        warmup, runs: runs that are not counted, and runs behind each median.
        autocast: low-precision dtype of the forwards.
        seed: of the random numbers that layers draw.

    Raises:
        CaptureError: the model cannot be taken apart.
        ProfileError: a layer fails on the sample.
    """

    if device != "meta" and (as_device is not None or dtype is not None):
        raise ProfileError(
            f"as_device and dtype are for a profile that is not run, found device={device!r}; write device='meta'"
        )

    def estimated() -> str:
        datasheet = as_device if isinstance(as_device, Device) else profiling.device_of(as_device or "here")
        with stand_ins(model, sample if isinstance(sample, tuple) else (sample,), profiling.dtype_of(dtype)) as inputs:
            captured = capture(model, inputs)
            return profiling.estimate(
                captured.layers,
                captured.graph,
                inputs,
                model_name=type(model).__name__,
                untouched=untouched,
                device=datasheet,
                loss=loss,
                optimizer=optimizer,
                autocast=autocast,
            ).to_json()

    def measured() -> str:
        inputs = to_device(sample if isinstance(sample, tuple) else (sample,), process_group.process_device(device))
        if not any(parameter.is_meta for parameter in model.parameters()):
            model.to(process_group.process_device(device))
        captured = capture(model, inputs)
        return profiling.measure(
            captured.layers,
            captured.graph,
            inputs,
            model_name=type(model).__name__,
            untouched=untouched,
            loss=loss,
            optimizer=optimizer,
            device=device,
            warmup=warmup,
            runs=runs,
            autocast=autocast,
            seed=seed,
        ).to_json()

    if device == "meta":
        return Profile.from_json(process_group.run_on_rank_0(estimated, profiling.here()), "rank 0's profile")
    return Profile.from_json(process_group.run_on_rank_0(measured, device), "rank 0's profile")


def plan(
    profile: Profile | GraphText,
    cluster: Cluster,
    *,
    schedule: str = "pipedream",
    microbatches: int | None = None,
    in_flight: str | tuple[int, ...] = "noam",
    shape: str | tuple[int, ...] = "any",
    cuts: tuple[int | str, ...] | None = None,
    update_delay: int = 0,
    all_workers: bool = False,
    recompute: str = "never",
    cost_model: str = "pipedream",
    allow_asynchronous: bool = False,
    strategy: str = "search",
    chunks: int | None = None,
) -> Plan:
    """Cuts a profiled model into stages, so that the slowest is as fast as can be and the memory holds.

    Args:
        profile: of the model, or a graph.txt of the original.
        cluster: workers, links, memory.
        schedule: method whose versions of the weights count against the memory; 'auto' takes the fastest by
            simulation, with its microbatches and its depth, see `choose`; a CSV file of PyTorch's says the stages too.
        microbatches: parts that a minibatch is split into.
        in_flight: depth: 'noam', 'full', 'auto' (the deepest of these that fits), or a count for each stage.
        shape: 'any' takes the fastest of one worker, data parallelism and pipelines; 'pipeline' at least two
            stages, replicated or not; 'straight' one stage for each worker; 'data-parallel' one stage on all;
            replica counts, as '2-1' or (2, 1), stages of these.
        cuts: by hand: the layers, by index or name, that begin a stage, for a shape of replica counts; by any other
            shape each stage has one worker.
        update_delay: 1 puts the updates of a pipeline's replicated stages behind their next forward.
        all_workers: 'any' and 'pipeline' leave no worker without work.
        recompute: which stages keep only their input between forward and backward, and do the forward again: 'never'
            any, 'auto' those that do not fit the memory otherwise, 'always' all.
        cost_model: 'pipedream', or 'classic' for the original planner's answer, see `classic`.
        allow_asynchronous: 'auto' may take a method whose gradients are late.
        strategy: 'search', or '2bw' for the planner of PipeDream-2BW: as many replicas for each stage, and the
            microbatches, by that paper's cost model (`pipedream.planner.two_bw`).
        chunks: stages of each worker, for methods that put several on one (`laying.lay_out`).

    Raises:
        PlanError: nothing fits, or the model or the cluster does not allow the shape.
    """
    if cost_model == "classic":
        if shape not in ("any", "straight") or cuts is not None or update_delay or microbatches or recompute != "never":
            raise PlanError(
                "the classic cost model knows the shapes 'any' and 'straight' only, and no cuts, update delay, "
                "recomputation or microbatches; leave them out, or plan with the cost model pipedream"
            )
        straight = shape == "straight"
        return classic(profile, cluster, straight=straight, schedule=schedule, in_flight=in_flight).plan
    if cost_model != "pipedream":
        raise PlanError(f"cost model {cost_model!r} is not known; write pipedream or classic")
    if isinstance(profile, GraphText):
        profile = profile.profile()
    if microbatches is not None and 1 < profile.batch < microbatches:
        raise PlanError(
            f"{microbatches} microbatches were asked of minibatches of {profile.batch} samples; ask for at most as "
            "many, or profile larger minibatches"
        )
    if strategy == "2bw":
        if (shape, cuts, update_delay, in_flight) != ("any", None, 0, "noam"):
            raise PlanError(
                "strategy 2bw was asked for with a shape, cuts, an update delay or a depth, which it chooses or does not know; "
                "leave them out"
            )
        planner.check_recompute(recompute)
        again = {"never": False, "auto": None, "always": True}[recompute]
        found = planner.two_bw(
            profile, cluster, lambda m: occupancy_of("pipedream_2bw", m), microbatches=microbatches, recompute=again
        )
        return replace(found, schedule="pipedream_2bw")
    if strategy != "search":
        raise PlanError(f"strategy {strategy!r} is not known; write search or 2bw")
    if schedule == "auto":
        if cuts is not None:
            raise PlanError("schedule auto was asked for with cuts by hand; name the schedule, or the shape alone")
        return choose(
            profile,
            cluster,
            microbatches=microbatches,
            in_flight=in_flight,
            shape=shape,
            update_delay=update_delay,
            all_workers=all_workers,
            recompute=recompute,
            allow_asynchronous=allow_asynchronous,
        ).plan
    if schedules.layout_of(schedule) is not None:
        if (
            shape not in ("any", "pipeline")
            or cuts is not None
            or update_delay
            or in_flight != "noam"
            or recompute == "auto"
        ):
            raise PlanError(
                f"schedule {schedule!r} lays its stages out on all workers, but a shape, cuts, an update delay, a depth or "
                "recomputation of some stages was asked for; leave these out"
            )
        again = recompute == "always"
        return laying.lay_out(profile, cluster, schedule, chunks=chunks, microbatches=microbatches, recompute=again)
    if chunks is not None:
        raise PlanError(f"{chunks} chunks were asked of {schedule!r}, whose workers have one stage each; leave it out")
    counts = None if isinstance(shape, str) and shape in planner.SHAPES else planner.counts_of(shape)
    if schedules.is_torch_csv(schedule):
        if shape == "data-parallel" or update_delay or (counts is not None and max(counts) > 1):
            raise PlanError(f"schedule {schedule!r} has no replicas; leave the shape and the update delay to the file")
        return plan_of_file(profile, cluster, schedule, microbatches, cuts, depth=in_flight, recompute=recompute)

    def search(parts: int) -> Plan:
        rule, method = occupancy_of(schedule, parts), schedules.properties_of(schedule)
        again = "always" if method.recomputes else recompute
        how: dict[str, Any] = {
            "microbatches": parts,
            "depth": in_flight,
            "update_delay": update_delay,
            "recompute": again,
        }
        if cuts is not None:
            how["part_ties"] = method.flushes
            return planner.by_hand(profile, cluster, cuts, counts, holds=rule, **how)
        return planner.plan(profile, cluster, holds=rule, shape=shape, all_workers=all_workers, **how)

    found = for_method(search(microbatches or 1), profile, schedule, microbatches)
    if microbatches is None and found.overfull is not None:  # in the microbatches that the method splits it into
        found = for_method(search(found.microbatches), profile, schedule, found.microbatches)
    return found


def choose(
    profile: Profile | GraphText,
    cluster: Cluster,
    *,
    microbatches: int | None = None,
    in_flight: str | tuple[int, ...] = "noam",
    shape: str | tuple[int, ...] = "any",
    update_delay: int = 0,
    all_workers: bool = False,
    recompute: str = "never",
    allow_asynchronous: bool = False,
    names: Sequence[str] = (),
) -> planner.Comparison:
    """Finds the method, the stages, the microbatches and the depth of the fewest simulated seconds per minibatch.

    What `plan` does with the schedule 'auto'; this tells what was compared too.

    Args:
        profile, cluster, all_workers, recompute: see `plan`.
        microbatches, in_flight, shape, update_delay: kept where given, else searched; see `planner.choose`.
        allow_asynchronous: also the methods whose gradients are late, which learn otherwise than one process does.
        names: of the methods to compare; () compares all that may be taken.

    Raises:
        PlanError: none works, or an unknown name.
    """
    if isinstance(profile, GraphText):
        profile = profile.profile()
    return planner.choose(
        profile,
        cluster,
        methods_of(names, allow_asynchronous=allow_asynchronous),
        score,
        occupancy_of,
        shape=shape,
        microbatches=microbatches,
        depth=in_flight,
        update_delay=update_delay,
        all_workers=all_workers,
        recompute=recompute,
    )


def classic(
    profile: Profile | GraphText,
    cluster: Cluster,
    *,
    straight: bool = False,
    schedule: str = "pipedream",
    in_flight: str | tuple[int, ...] = "noam",
) -> planner.Classic:
    """Finds what the original PipeDream's planner answers, and its predicted seconds; docs/cost_models.md.

    Args:
        profile: of the model, or a graph.txt of the original.
        cluster: workers and bandwidths, level by level, without a limit on memory.
        straight: only pipelines with one worker for each stage.
        schedule, in_flight: for the bytes that the plan predicts; they decide nothing.

    Raises:
        PlanError: see `pipedream.planner.classic`.
    """
    return planner.classic(profile, cluster, straight=straight, versions=versions_of(schedule), depth=in_flight)


def simulate(
    plan: Plan,
    *,
    schedule: str | Schedule | None = None,
    microbatches: int | None = None,
    minibatches: int | None = None,
    weight_s: float | None = None,
    jitter: float | Mapping[str, float] = 0.0,
    slow: Mapping[int, float] | None = None,
    seed: int = 0,
    overlap: bool = True,
) -> Timeline:
    """Predicts what runs when, from an empty pipeline to an empty one.

    Args:
        plan: with its predicted seconds and bytes.
        schedule: a method's name, a CSV file of PyTorch's, or a schedule; the plan's, or PipeDream's own, unless said.
        microbatches, minibatches: m, and the length of the run, see `schedules.run_of`; m is the plan's split unless
            said, and for methods that do not split a minibatch `microbatches` is the length of the run.
        weight_s: seconds of the weight gradient, where the backward is split.
        jitter: coefficient of variation of an op's seconds, which are then drawn from a lognormal distribution of the
            same mean; one for all ops, or by letter, as {"F": 0.1, "B": 0.2}.
        slow: rank -> factor on the seconds of its ops.
        seed: of the draws; the same seed gives the same run.
        overlap: sums over the replicas of a stage begin inside the backward, bucket by bucket, as in the runtime;
            otherwise they are charged whole, right before their update.

    Raises:
        ScheduleError: the method does not work with this plan.
        PlanError: a jitter or a factor that makes no sense, or a slow rank that there is not.
    """
    name, split = (schedule, None) if isinstance(schedule, Schedule) else asked_of(plan, schedule)
    run = schedules.run_of(name, plan, microbatches, minibatches, split=split)
    try:
        stragglers = clock.Stragglers(jitter, slow or {}, seed)
        stragglers.check_ranks(run.schedule.placement.workers)
    except ValueError as error:
        raise PlanError(str(error)) from None
    program = lower(run.schedule)
    verify(program)
    return simulate_program(program, run.microbatches, weight_s=weight_s, stragglers=stragglers, overlap=overlap)


def simulate_program(
    program: Program,
    total: int,
    *,
    weight_s: float | None = None,
    stragglers: clock.Stragglers | None = None,
    overlap: bool = True,
) -> Timeline:
    """Predicts a run of `total` microbatches of a program; see `simulate`."""
    try:
        seconds = clock.costs(program.plan, split=program.microbatches, weight_s=weight_s, overlap=overlap)
    except ValueError as error:
        raise PlanError(f"these seconds make no sense: {error}") from None
    return clock.simulate(program, seconds, total, stragglers)


def layers_of(model: Any, plan: Plan, sample: Any) -> Captured:
    """Finds the layers of a plan in a model, by name or with a sample of its input.

    Raises:
        PlanError: the plan is of another model.
    """
    names = [name for stage in plan.stages for name in stage.names]
    if sample is not None:
        captured = capture(model, sample if isinstance(sample, tuple) else (sample,))
    elif len(names) == plan.stages[-1].last and plan.unit == "minibatch":
        captured = find_layers(model, names)
    else:
        raise PlanError(
            "the plan does not name the model's layers; plan from a profile of the model, or give the pipeline "
            "sample=... (an input of the model) so that it can find them"
        )
    plan.check_layers(len(captured.layers))
    own = [layer.name for layer in captured.graph.layers]
    if names != own and sorted(names) == sorted(own):
        here = next(i for i, name in enumerate(names) if name != own[i])
        raise PlanError(
            f"the plan runs layer {names[here]!r} where the model runs {own[here]!r}: it was made for a graph whose "
            "branches it takes one after the other, and a pipeline runs chains; plan again from a profile of the model"
        )
    return captured
