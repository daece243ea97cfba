"""Profiling: the layers of a model, and the seconds and bytes of each, measured or predicted.

Only rank 0 profiles, unless all are asked to run the layers: then the others' figures are thrown away.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn

from pipedream import profiler
from pipedream.capture import (
    Captured,
    build_captured,
    call_model,
    capture,
    check_module,
    find_layers,
    list_cuda_devices,
    preserve_state,
    stand_ins,
)
from pipedream.core.errors import PlanError, ProfileError
from pipedream.core.extensions import list_offers
from pipedream.core.hardware.devices import Device
from pipedream.core.malloc import keep_freed_memory
from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.profile import Profile, RankProfile
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.ranks import TensorLayout
from pipedream.core.units import describe_slowness
from pipedream.plan_request import NO_MESH
from pipedream.runtime.comm.values import tensors_in, to_device
from pipedream.runtime.data.splitter import DENSE, BatchDim, is_sparse, known_samples, split_batch
from pipedream.runtime.weights.parameters import named_state
from pipedream.services import roofline
from pipedream.services.failure.guard import guard_job
from pipedream.services.joining import joining
from pipedream.services.losses.loss_probe import probe_weight
from pipedream.services.probe.core_times import CoreTimes
from pipedream.services.probe.probe import measure_runtime
from pipedream.workflows.disturbance import describe_disturbance
from pipedream.workflows.exclusions import check_options

MAX_RANKS = 8
"""Ranks of the largest meshes that are measured by default."""

_TRIES = 3


def profile(
    model: Any,
    sample: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Callable[[list[tuple[str, Any]]], Any] | None = None,
    scheduler: Callable[[Any], Any] | None = None,
    device: str = "cpu",
    as_device: str | Device | None = None,
    dtype: Any = None,
    warmup: int = 3,
    runs: int = 10,
    autocast: Any = None,
    seed: int = 0,
    finest: bool = False,
    batch_dim: BatchDim = 0,
    microbatches: int | None = None,
    layout: TensorLayout | None = None,
    meshes: Sequence[str] | str = (),
    on_all_ranks: bool = False,
) -> Profile:
    """Measures seconds and bytes of each layer of a model on a sample minibatch.

    Every rank calls it, and all get rank 0's profile.

    On the device 'meta' nothing is computed or allocated: seconds follow from flops and bytes by the roofline of
    `as_device`. The notes of the profile list the assumptions. Otherwise what the runtime itself costs is measured too.

    Args:
        sample: one minibatch: the model's only input, a tuple of positional or a mapping of keyword arguments.
        loss: from the model's output to a scalar; its time is charged to the last stage.
        optimizer: factory from named parameters to an optimizer, whose update time and state are measured.
        scheduler: factory from the optimizer to a learning-rate schedule, whose step is a part of the update.
        device: 'cpu', 'cuda' or 'cuda:N'; 'meta' predicts without measuring.
        as_device: with 'meta', a Device, its name in `pipedream.core.hardware.devices` ('A100-80GB'), or 'here' for
            this machine (the default).
        dtype: with 'meta', the dtype of all floating-point tensors; None leaves each its own.
        warmup: runs before measuring.
        runs: measured runs; their median is the result.
        autocast: low-precision dtype of the forwards, or its name.
        seed: of the random numbers that layers draw.
        finest: also split the modules of a chain into their submodules.
        batch_dim: as in `pipedream.Pipeline`.
        microbatches: number per minibatch, if known. One is measured as well, because a small batch may take another
            time per sample than a large one; by default half a minibatch.
        layout: says which tensors a mesh shards.
        meshes: such as ('model:2',); one rank of each is measured too, in this process, with its parts of all tensors.
            What it exchanges with the others is counted (docs/meshes.md). 'auto' takes all meshes of 2, 4 and 8 ranks
            ('auto:4': of 2 and 4) over the dimensions of the layout's rules that are legal for the model; the profile's
            notes say which are not.
        on_all_ranks: the other ranks run the layers meanwhile, as in data parallelism: ranks share caches and memory.
            Each then needs memory for the activations of the whole model.

    Raises:
        CaptureError: the model cannot be split into layers.
        ProfileError: a layer fails on the sample, or options exclude each other.
        PlanError: the layout does not fit the model or a mesh.
    """
    check_module(model)
    options = {"device": device, "as_device": as_device, "dtype": dtype, "microbatches": microbatches}
    check_options(options, error=ProfileError)
    if meshes == NO_MESH:
        meshes = ()
    if meshes and device == "meta":
        raise ProfileError(
            f"meshes={meshes!r} was given with device='meta', but a rank of a mesh can only be measured; profile with "
            "device='cpu' or 'cuda'"
        )
    if microbatches is not None and microbatches < 1:
        raise ProfileError(f"microbatches={microbatches} was given; give at least 1")
    inputs = sample if isinstance(sample, tuple) else dict(sample) if isinstance(sample, Mapping) else (sample,)
    if any(map(is_sparse, tensors_in(sample))):
        raise ProfileError(f"a tensor of the sample is sparse or nested, which cannot be an input; {DENSE}")
    shared: dict[str, Any] = {
        "model_name": type(model).__name__,
        "preserve_state": preserve_state,
        "loss": loss,
        "optimizer": optimizer,
        "autocast": profiler.dtype_of(autocast),
        "samples": known_samples(sample, batch_dim),
    }
    if device == "meta":
        datasheet = as_device if isinstance(as_device, Device) else roofline.device_of(as_device or "here")
        make = partial(_estimate, model, inputs, profiler.dtype_of(dtype), finest, device=datasheet, **shared)
        return _profile_on_rank_0(make, profiler.choose_device_type())
    parts = 2 if microbatches in (None, 1) else microbatches
    measure = partial(
        profiler.measure, device=device, scheduler=scheduler, warmup=warmup, runs=runs, seed=seed, parts=parts, **shared
    )
    # The others run the layers once, so another try would be alone on the machine.
    tries = 1 if on_all_ranks else _TRIES
    make = partial(_measure, model, inputs, layout, meshes, finest, batch_dim, measure, tries=tries)
    # Without an optimizer, whose copies of all weights would take the machine's memory once for each rank.
    run_layers = partial(
        _measure, model, inputs, layout, (), finest, batch_dim, partial(measure, optimizer=None), tries=1
    )
    profile = _profile_on_rank_0(make, device, run_layers if on_all_ranks else None)
    return replace(profile, runtime=measure_runtime(device).costs)


def _profile_on_rank_0(
    make: Callable[[], Profile], device: str, run_layers: Callable[[], object] | None = None
) -> Profile:
    """Returns rank 0's profile; the others run the layers meanwhile."""
    if not joining.is_distributed():
        return make()
    rank, count = joining.join_group(device)
    with guard_job(rank, count) as activity, activity.at("profiling"):
        if rank and run_layers is not None:
            with suppress(Exception):  # rank 0 fails as well, and says why
                run_layers()
        text = joining.make_on_rank_0(lambda: make().to_json(), rank)
    return Profile.from_json(text, "rank 0's profile")


def _estimate(model: Any, inputs: Any, dtype: Any, finest: bool, **options: Any) -> Profile:
    with stand_ins(model, inputs, dtype) as empty:
        captured = capture(model, empty, finest=finest)
        return roofline.estimate(captured.layers, captured.graph, captured.arguments(empty), **options)


def _measure(
    model: Any,
    inputs: Any,
    layout: TensorLayout | None,
    meshes: Sequence[str] | str,
    finest: bool,
    batch_dim: BatchDim,
    measure: partial[Profile],
    *,
    tries: int,
) -> Profile:
    """Measures the layers, and a rank of each mesh. `measure` lacks the layers, their graph and their input.

    Measures again, up to so many `tries`, while other work disturbs.
    """
    options = measure.keywords
    torch_device = joining.process_device(options["device"])
    device_inputs = to_device(inputs, torch_device)
    keep_freed_memory()  # as in training
    has_numbers = not any(parameter.is_meta for parameter in model.parameters())
    if has_numbers:
        model.to(torch_device)
    captured = capture(model, device_inputs, finest=finest)
    if options["loss"] is None and batch_dim == 0 and has_numbers:
        captured = replace(captured, graph=replace(captured.graph, loss_weight=_find_loss_weight(model, device_inputs)))
    arguments, is_chain = captured.arguments(device_inputs), captured.model is None
    # The only argument of a slice is the whole input.

    def take_part(value: Any, count: int, size: int) -> Any:
        return split_batch(value, count, [size, count - size], batch_dim)[0]

    part_of = take_part if is_chain else lambda only, *sizes: (take_part(only[0], *sizes),)
    measure = partial(measure, captured.layers, captured.graph, arguments, part_of=part_of)
    ranks: Sequence[RankProfile] = ()
    notes: list[str] = []
    if meshes:
        if not (offers := list_offers("profiling")):
            raise ProfileError(f"meshes={meshes!r} was given, but no extension here measures meshes; leave it out")
        ranks, notes = offers[0].measure_ranks(captured, model, layout, meshes, torch_device, measure)
    profile, busy = _measure_again(measure, tries) if torch_device.type == "cpu" else (measure(), "")
    profiler.release_cache(torch_device)
    return replace(profile, ranks=tuple(ranks), notes=(*profile.notes, *notes, *filter(None, [busy])))


def _measure_again(measure: partial[Profile], tries: int) -> tuple[Profile, str]:
    """Returns the first profile that other work has not disturbed, else the fastest, and a note on that work."""
    disturbed: list[tuple[float, Profile, str]] = []
    for number in range(tries):
        begin_times = CoreTimes.now()
        profile = measure(reason=", measured again: other work took the processor" * bool(number))
        slowness = begin_times.slowness_until(CoreTimes.now())
        note = describe_disturbance(profile, slowness, profiler.count_threads())
        if not note:
            busy = describe_slowness(slowness, "this process's")
            text = f"while the layers were measured, {busy}: their seconds may be too long; profile again"
            return profile, text if busy else ""
        disturbed.append((profile.forward_s + profile.backward_s, profile, note))
    _, profile, note = min(disturbed, key=itemgetter(0))
    return profile, note


def _find_loss_weight(model: Any, inputs: Any) -> str:
    """Returns what the model's own loss is a mean over, if it returns a loss."""
    with preserve_state([model], list_cuda_devices(model, inputs)):
        for module in model.modules():
            module.training = False
        return probe_weight(partial(call_model, model), inputs, samples=known_samples(inputs), split=split_batch)


def find_plan_layers(model: Any, plan: Plan, sample: Any) -> Captured:
    """Finds a plan's layers in a model, by name or with a sample of its input.

    Raises PlanError if the plan was made for another model.
    """
    check_module(model)
    names = [name for stage in plan.stages for name in stage.names]
    if plan.graph is not None:
        return _find_graph_layers(model, plan.graph)
    if sample is not None:
        captured = capture(model, sample)
    elif len(names) == plan.stages[-1].last and plan.unit == "minibatch":
        captured = find_layers(model, names)
    else:
        raise PlanError(
            "the plan does not name the model's layers; plan from a profile of the model, or give the pipeline "
            "sample=... (an input of the model) so that it can find them"
        )
    plan.check_layers(len(captured.layers))
    model_names = [layer.name for layer in captured.graph.layers]
    if names != model_names and sorted(names) == sorted(model_names):
        step = next(i for i, name in enumerate(names) if name != model_names[i])
        raise PlanError(
            f"the plan runs layer {names[step]!r} where the model runs {model_names[step]!r}: it was made for a graph "
            "whose branches it takes one after the other, and a pipeline runs chains; plan again from a profile of the "
            "model"
        )
    return captured


def _find_graph_layers(model: Any, graph: LayerGraph) -> Captured:
    """Finds the layers of a plan that has the model's graph. Raises PlanError if it is that of another model."""
    modules, state = dict(model.named_modules(remove_duplicate=False)), named_state(model)

    def refuse(problem: str) -> NoReturn:
        raise PlanError(f"the plan was made for another model: {problem}; plan again from this model's profile")

    for call in graph.calls:
        if call.path not in modules:
            refuse(f"it has a module {call.path!r}, which {type(model).__name__} lacks")
    used_tensors = set()
    for layer in graph.layers:
        for name in layer.parameters:
            if name not in state:
                refuse(f"its layer {layer.name!r} uses {name!r}, which {type(model).__name__} lacks")
            used_tensors.add(id(state[name]))
    if unknown := [name for name, tensor in state.items() if id(tensor) not in used_tensors]:
        refuse(f"{type(model).__name__} has {min(unknown)!r}, which no layer of the plan uses")
    return build_captured(model, graph)
