"""What passes and updates wait for in the memory of the machine (`^F`, `^B` and `^U` of a program)."""

from pipedream.core.schedule import moves
from pipedream.extensions.host_weights.copied_weights import CopiedWeights
from pipedream.extensions.host_weights.home_versions import HostVersions
from pipedream.runtime.comm.channel import Waiting, wait_for
from pipedream.runtime.worker import Worker


def fetch_weights(worker: Worker, stage: int, index: int) -> Waiting[None]:
    """Waits for the weights that a forward copies, and for the buffers that it changes."""
    program = worker.program
    if worker.stream.trains:
        version, is_elsewhere = program.weights.forward_version(stage, index), program.placement.runs_backward_elsewhere
        yield from _begin_pass(worker, stage, index, version, changes_buffers=not is_elsewhere(stage))


def fetch_buffers(worker: Worker, stage: int, index: int) -> Waiting[None]:
    """Waits for the buffers that backwards continue from, on another rank than the turn before."""
    return _begin_pass(worker, stage, index, 0, changes_buffers=True)


def _begin_pass(worker: Worker, stage: int, index: int, version: int, *, changes_buffers: bool) -> Waiting[None]:
    store = worker.stage_passes[stage].store
    assert isinstance(store, CopiedWeights), f"passes at stage {stage} copy nothing"
    pending = store.begin_pass(index, version, changes_buffers=changes_buffers)
    if pending.ready():
        pending.result()
        return
    start = worker.recorder.mark()
    yield from wait_for(pending)
    worker.recorder.note("wait", stage, worker.stream.offset + index, start)


def fetch_gradients(worker: Worker, stage: int, update: int) -> Waiting[None]:
    """Waits for an update's gradients, which the ranks of its backwards leave, and takes them."""
    stage_state, start = worker.stage_states[stage], worker.recorder.mark()
    assert isinstance(stage_state.versions, HostVersions), f"no other rank leaves gradients of stage {stage}"
    yield from stage_state.versions.await_gradients(update, stage_state.gradients)
    worker.recorder.note("wait", stage, update, start)
    stage_state.next_forward = worker.program.updates.members(stage, update).stop


ACTIONS = {
    moves.FETCH_WEIGHTS: fetch_weights,
    moves.FETCH_BUFFERS: fetch_buffers,
    moves.FETCH_GRADIENTS: fetch_gradients,
}
