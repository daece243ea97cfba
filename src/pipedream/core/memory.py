"""Bytes that a worker needs: versions, gradients, optimizer state, activations in flight.

Under 1F1B stage s holds W_s + 1 minibatches in flight, and as many versions of its weights under weight
stashing (PipeDream, section 3.3), two under double buffering (PipeDream-2BW, section 3.1), one under a
flush. The newest version is the optimizer's own copy, so it is not counted again.
"""

from __future__ import annotations

__all__ = ["stage_bytes"]


def stage_bytes(
    *,
    parameter_bytes: int,
    optimizer_bytes: int,
    activation_bytes: int,
    input_bytes: int,
    versions: int,
    in_flight: int,
    recompute: bool = False,
) -> int:
    """Returns the peak bytes of one replica of a stage.

    Args:
        parameter_bytes: of one version of the stage's weights.
        optimizer_bytes: of the optimizer's state for them.
        activation_bytes: kept for the backward of one microbatch.
        input_bytes: of the stage's input for one microbatch; one more is being received.
        versions: distinct sets of weights alive at once, the newest included.
        in_flight: microbatches forwarded and not yet backwarded, at most.
        recompute: of those only the input is kept, and the activations of one whose forward is done again.

    Gradients count once, in the size of the weights.
    """
    state = parameter_bytes * (versions + 1) + optimizer_bytes
    if recompute:
        return state + activation_bytes + (in_flight + 1) * input_bytes
    return state + in_flight * activation_bytes + 2 * input_bytes
