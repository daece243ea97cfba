"""What is decided before an update: nothing, unless gradients are clipped or updates skipped (`clipping`)."""

from collections.abc import Mapping

from pipedream.core.extensions import find_offer
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.update_policy import Policy
from pipedream.runtime.comm.channel import Group, Waiting
from pipedream.runtime.update.optimizer import Optimizer


class Decision:
    """Decides about the updates of one rank's stages under one program. This base class makes all as they are.

    Attributes:
        needs_norms: whether each update needs the norm of its gradients.
        is_global: whether it needs those of all stages.
        norm_square: of the newest finite global norm; 0 before the first.
    """

    needs_norms = False
    is_global = False
    norm_square = 0.0

    def decide(self, optimizers: Mapping[int, Optimizer]) -> Waiting[None]:
        """Decides about updates of all stages of the rank, whose gradients are in the handles."""
        yield from ()

    def decide_locally(self, optimizer: Optimizer) -> None:
        """Decides about the update of one stage by its own gradients."""

    def finish(self) -> Waiting[None]:
        """Receives what is still under way, at a drain."""
        yield from ()


def make_decision(policy: Policy, program: Program, group: Group) -> Decision:
    """Returns what decides about updates as a policy asks; `group`: of all workers."""
    if not policy.needs_norms:
        return Decision()
    offer = find_offer("clipping", "gradients were to be clipped, or updates skipped")
    decision: Decision = offer.Clipping(policy, program, group)
    return decision
