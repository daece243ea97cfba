"""Advice for a plan whose compensation does not fit."""

from collections.abc import Iterator

from pipedream import schedules
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_bytes
from pipedream.plan_request import AUTO, PlanRequest


def advise(profile: Profile, request: PlanRequest) -> Iterator[str]:
    """Yields the bytes that the bases of a `BasisRotation` take, and those of smaller forms."""
    name = request.schedule
    if name == AUTO or not (kept_bytes := _count_bases(profile, name)):
        return
    text = f"the bases of {name} take {format_bytes(kept_bytes)}"
    for options in ({"geometry": "one_sided"}, {"geometry": "one_sided", "estimate": "first_moment"}):
        smaller = schedules.canonical(name.partition("[")[0], **options)
        if (need_bytes := _count_bases(profile, smaller)) < kept_bytes:
            text += f", those of {smaller} {format_bytes(need_bytes)}"
    yield text


def _count_bases(profile: Profile, name: str) -> int:
    """Returns the bytes of the bases that a method keeps for all weights."""
    if schedules.canonical(name).partition("[")[0] != "basis_rotation":
        return 0
    updates = schedules.build(name, Plan.uniform(2)).updates
    return updates.matrix_bytes([matrix for layer in profile.layers for matrix in layer.matrices])[0]
