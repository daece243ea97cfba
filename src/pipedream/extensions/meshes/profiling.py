"""Measures a rank of each mesh, beside the layers on a single rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from pipedream import profiler
from pipedream.capture import Captured
from pipedream.core.errors import PlanError, ProfileError
from pipedream.core.model.profile import Profile, RankProfile
from pipedream.core.plan.ranks import Mesh, TensorLayout
from pipedream.extensions.meshes.layout import Layout
from pipedream.extensions.meshes.one_rank import one_rank
from pipedream.extensions.meshes.planning import NOT_MEASURED
from pipedream.plan_request import AUTO
from pipedream.workflows.profile import MAX_RANKS


def measure_ranks(
    captured: Captured,
    model: Any,
    layout: TensorLayout | None,
    meshes: Sequence[str] | str,
    torch_device: Any,
    measure: partial[Profile],
) -> tuple[list[RankProfile], list[str]]:
    """Returns the profile of a rank of each mesh, and notes on those that were left out.

    Args:
        meshes: as in `pipedream.profile`.
        measure: measures the layers.
    """
    names = (layout if isinstance(layout, Layout) else Layout()).of_model(model)
    measure_rank = partial(_measure_rank, captured, names, torch_device=torch_device, measure=measure)
    if not isinstance(meshes, str):
        return [measure_rank(Mesh(mesh)) for mesh in meshes], []
    parameters = profiler.all_parameters(captured.layers, captured.graph)
    names.check(parameters, [layer.name for layer in captured.graph.layers], ())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    candidates = names.candidates(shapes, measure.keywords["samples"], _parse_max_ranks(meshes))
    return _measure_legal_meshes(candidates, measure_rank)


def _parse_max_ranks(meshes: str) -> int:
    """Returns the most ranks that a mesh may have by the text 'auto' or 'auto:N'."""
    auto, _, max_ranks = meshes.partition(":")
    if auto != AUTO or (max_ranks and not (max_ranks.isdecimal() and int(max_ranks) > 1)):
        raise ProfileError(
            f"meshes={meshes!r} was given; give 'auto', 'auto:4' for meshes of at most 4 ranks, or meshes such as "
            "('model:2', 'data:2')"
        )
    return int(max_ranks or MAX_RANKS)


def _measure_legal_meshes(
    candidates: Mapping[Mesh, str], measure_rank: Callable[[Mesh], RankProfile]
) -> tuple[list[RankProfile], list[str]]:
    """Returns a rank of each legal mesh, and why the others are left out."""
    ranks, problems = [], {mesh: why for mesh, why in candidates.items() if why}
    for mesh, why in candidates.items():
        if not why:
            try:
                ranks.append(measure_rank(mesh))
            except (PlanError, ProfileError) as error:
                problems[mesh] = str(error)
    meshes_by_reason: dict[str, list[str]] = {}
    for mesh, why in problems.items():
        meshes_by_reason.setdefault(why, []).append(str(mesh))
    notes = [f"{NOT_MEASURED}{' or '.join(names)}: {why}" for why, names in meshes_by_reason.items()]
    return ranks, notes if candidates else [f"{NOT_MEASURED}any mesh: the layout has no rule"]


def _measure_rank(
    captured: Captured, layout: Layout, mesh: Mesh, *, torch_device: Any, measure: partial[Profile]
) -> RankProfile:
    layers, graph = captured.layers, captured.graph
    layout.check(profiler.all_parameters(layers, graph), [layer.name for layer in graph.layers], [mesh])
    with one_rank(layers, graph, layout, mesh, torch_device) as rank:
        profile = measure(call=rank.call, enter_backward=rank.enter_backward)
        forward, backward, update = rank.collectives
        sizes = zip(profile.layers, rank.sent_bytes, rank.gathered_bytes, strict=True)
        costs = tuple(replace(layer, output_bytes=output, gathered_bytes=gathered) for layer, output, gathered in sizes)
    values: dict[str, Any] = {field.name: getattr(profile, field.name, None) for field in fields(RankProfile)}
    values |= {"mesh": mesh.text, "layout": layout.rules_on(mesh) if layout.uses_cuts(mesh) else str(layout)}
    values |= {"layers": costs, "forward": tuple(forward), "backward": tuple(backward), "update": update}
    return RankProfile(**values)
