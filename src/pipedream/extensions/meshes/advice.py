"""Advice for a plan that does not fit."""

from collections.abc import Iterator

from pipedream.core.model.profile import Profile
from pipedream.plan_request import PlanRequest


def advise(profile: Profile, request: PlanRequest) -> Iterator[str]:
    """Yields the advice to use a mesh where memory is short, if the request names none."""
    if request.mesh or request.workers_and_links.workers < 2:
        return
    source = "" if profile.ranks else ", from a profile with a layout and meshes='auto' (--mesh auto)"
    yield f"a stage may also be sharded over several ranks: plan with mesh='auto' (--mesh auto){source}"
