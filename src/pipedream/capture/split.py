"""Turns the record of a forward into a LayerGraph: where the model may be cut, and what crosses each cut.

A cut lies before the entry of a leaf call, so a layer is one leaf call or more with the glue code that follows. The cut
is allowed if each tensor that is made before and read after it is taken or returned by some module before it (there
sender and receiver find it), and if nothing that crosses is written later through another tensor of the same storage.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pipedream.capture.record import END, IN_FUNCTION, CallRecord, Recording, TensorRecord
from pipedream.core.model.graph import Call, Layer, LayerGraph, Value
from pipedream.core.user_code import source_of

Refused = dict[str, str]
"""Call -> why there is no cut before it."""

Ties = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
"""Groups of layers, and those of them that no method can train in separate stages."""

_LOOP = 3  # calls of one module with parameters, from which on they are taken for a loop over a sequence's length


def build_graph(
    model: nn.Module,
    recording: Recording,
    refused: Refused,
    replayed: Sequence[str] = (),
    evaluation: Recording | None = None,
) -> tuple[LayerGraph, Refused]:
    """Returns the finest graph without the cuts that are refused already, and all refused cuts.

    Args:
        evaluation: of a forward in evaluation mode, if it is to have calls and values of its own.
    """
    graph, refused = _build_graph(model, recording, refused, replayed)
    if evaluation is None or not graph.calls:
        return graph, refused
    starts = {layer.name for layer in graph.layers}
    # Evaluation is cut where training is, and nowhere else.
    others = {call.name: "" for call in evaluation.root.every() if call.name not in starts}
    other, reasons = _build_graph(model, evaluation, others, replayed)
    lost = starts - {layer.name for layer in other.layers} - {graph.layers[0].name}  # which no cut precedes
    if lost:
        reasons = {name: f"in evaluation mode {reasons.get(name, 'it is not called')}" for name in sorted(lost)}
        return build_graph(model, recording, refused | reasons, replayed, evaluation)
    return replace(graph, evaluation=replace(other, layers=graph.layers, ties=(), inseparable=())), refused


def _build_graph(
    model: nn.Module, recording: Recording, refused: Refused, replayed: Sequence[str]
) -> tuple[LayerGraph, Refused]:
    leaves = list(_iterate_leaves(recording.root))
    if len(leaves) < 2:
        names = dict([*model.named_parameters(), *model.named_buffers()])
        return LayerGraph((Layer(type(model).__name__, type(model).__name__, tuple(names)),), ()), {}
    values = [record for record in recording.tensors if record.depends and not record.state]
    state = [record for record in recording.tensors if record.state]
    refused = _refuse_cuts(recording, leaves, values) | refused
    calls = _list_calls(recording, leaves, values)
    for leaf in leaves[1:]:
        hidden = [call for call in list_skipped_calls(calls, leaf.start) if call.hides]
        if hidden:
            refused.setdefault(leaf.name, _explain_unsendable(recording, hidden[0].name))
    starts = [leaf for number, leaf in enumerate(leaves) if not number or leaf.name not in refused]
    moments = [-1, *(leaf.start for leaf in starts[1:])]
    cuts = moments[1:]
    tensor_names = _assign_tensors(model, recording, leaves, moments, state)
    layers = tuple(
        Layer(leaf.name, type(leaf.module).__name__, tuple(parameters))
        for leaf, parameters in zip(starts, tensor_names, strict=True)
    )
    ties, inseparable = _find_ties(model, leaves, moments, tensor_names)
    # Calls that draw random numbers, or after which glue code does.
    leaf_starts = [leaf.start for leaf in leaves]
    drawing = (leaves[max(bisect_right(leaf_starts, moment) - 1, 0)].path for moment in recording.draws)
    crossing = [_make_value(record, cuts) for record in (*values, *_list_inputs(recording))]
    graph = LayerGraph(
        layers,
        tuple((i, i + 1) for i in range(len(layers) - 1)),
        ties,
        inseparable,
        calls=calls,
        values=tuple(value for value in crossing if value is not None),
        glue=_list_glue(state, leaves),
        replayed=tuple(replayed),
        seeded=tuple(dict.fromkeys(drawing)),
        draws_in_python=recording.draws_in_python,
        inputs=tuple(dict.fromkeys(r.sites[0].path for r in recording.tensors if r.sites and r.sites[0].moment == -1)),
    )
    return graph, refused


def postpone_returned(recording: Recording) -> None:
    """Lets what a call returns, and no function reads before, be computed where the call ends.

    Code outside of modules makes it, such as slices of hidden states that are kept until then, so that no stage in
    between could find it. The stage of the call's end computes it again from what modules have taken or returned
    (`SliceForward`). If this needs parameters or random numbers, it is missing in the model's output.
    """
    drawn, starts = set(recording.draws), [call.start for call in recording.root.every()]

    def is_returned(record: TensorRecord) -> bool:
        return record.depends and record.last_read <= record.born and record.sites[0].end == "out"

    def find_sources(record: TensorRecord) -> list[TensorRecord] | None:
        if record.state or record.storage in recording.writes:
            return None
        if not record.depends or (record.sites and not is_returned(record)):
            return [record]
        if not record.parents or record.born in drawn:
            return None
        origins = [find_sources(parent) for parent in record.parents]
        return None if None in origins else [source for sources in origins for source in sources or ()]

    for record in recording.tensors:
        if record.state or not record.sites or not is_returned(record):
            continue
        moment, sources = record.sites[0].moment, find_sources(record)
        if bisect_right(starts, record.born) == bisect_right(starts, moment):
            continue  # no stage can begin in between
        if sources is None:
            if all(site.end == "out" for site in record.sites):
                record.last = record.born
            continue
        for source in sources:
            source.last = max(source.last, moment)
            if not source.depends:
                source.uses.append(moment)
        record.born = moment


def _explain_unsendable(recording: Recording, name: str) -> str:
    call = next(call for call in recording.root.every() if call.name == name)
    place = source_of(type(call.module).forward)
    advice = "let it return tensors in tuples, lists, dicts or dataclasses"
    if "Cache" in call.opaque:
        advice = "switch caches off, as with use_cache=False in Hugging Face"
    return (
        f"the module {name!r} ({', '.join(filter(None, (type(call.module).__name__, place)))}) returns an object of "
        f"the class {call.opaque}, which cannot be sent; {advice}"
    )


def list_skipped_calls(calls: Sequence[Call], moment: int) -> list[Call]:
    """Returns the calls that a stage skips which begins at a moment: the outermost that have ended by then.

    Of a call that hides something the calls inside are skipped; a leaf that hides is returned.
    """
    skipped: list[Call] = []
    skipped_until = -2  # before every call
    for number, call in enumerate(calls):
        if call.start >= moment:
            break
        if call.start < skipped_until or call.end > moment:
            continue
        inner = number + 1 < len(calls) and calls[number + 1].start < call.end
        if not (call.hides and inner):
            skipped.append(call)
            skipped_until = call.end
    return skipped


def _iterate_leaves(call: CallRecord) -> Iterable[CallRecord]:
    for inner in call.inner:
        if inner.free:
            continue
        if inner.whole or all(call.free for call in inner.inner):
            yield inner
        else:
            yield from _iterate_leaves(inner)


def _refuse_cuts(recording: Recording, leaves: Sequence[CallRecord], values: Sequence[TensorRecord]) -> Refused:
    refused: Refused = {}
    for leaf in leaves[1:]:
        if recording.root.whole:
            refused[leaf.name] = "the model itself has a full backward hook, which takes the gradients of a whole call"
        if leaf.whole not in ("", "checkpointed", "hooked"):
            refused[leaf.name] = f"it runs {leaf.whole}"
        if any(first < leaf.start <= last for first, last in recording.hooked):
            refused[leaf.name] = (
                "a hook on a tensor is registered after its first use, or removed by the forward; register it where "
                "the tensor is made, and remove it after the backward"
            )
        if same := _find_written_alias(recording, values, leaf.start):
            refused[leaf.name] = f"a tensor made by {same.made_by} is written later through another tensor"
        lost = next(
            (
                record
                for record in values
                if _is_read_across(record, leaf.start) and not (record.sites and record.sites[0].moment <= leaf.start)
            ),
            None,
        )
        if lost is not None:
            refused[leaf.name] = (
                f"a tensor of shape {list(lost.tensor.shape)} made by {lost.made_by} is read later, and no module has "
                "taken or returned it"
            )
    for record in recording.tensors:
        if record.state in recording.changed_by_forward and record.reads:
            for leaf in leaves:
                if record.reads[0][0] < leaf.start <= record.reads[-1][0]:
                    refused.setdefault(
                        leaf.name, f"the buffer {record.state}, which is written, is used before and after"
                    )
    for call in recording.root.every():
        if call.whole:
            continue
        counts = Counter(
            inner.path for inner in call.inner if not inner.free and any(True for _ in inner.module.parameters())
        )
        for path, count in counts.items():
            if count >= _LOOP:
                again = [inner for inner in call.inner if inner.path == path]
                for leaf in leaves:
                    if again[0].start < leaf.start <= again[-1].end:
                        refused.setdefault(leaf.name, f"{path} is called {count} times in a loop")
    return refused


def _is_read_across(record: TensorRecord, moment: int) -> bool:
    return record.born < moment <= record.last


def _find_written_alias(recording: Recording, values: Sequence[TensorRecord], moment: int) -> TensorRecord | None:
    storages: set[int] = set()
    for record in values:
        if _is_read_across(record, moment) and recording.writes:
            # They arrive as separate tensors: a write to one would not reach the other.
            if record.storage in storages and any(
                written >= moment for written in recording.writes.get(record.storage, ())
            ):
                return record
            storages.add(record.storage)
    return None


def _list_calls(recording: Recording, leaves: Sequence[CallRecord], values: Sequence[TensorRecord]) -> tuple[Call, ...]:
    """The calls that stages may skip or begin with, without those inside leaves."""
    calls = []
    ends = {id(leaf): leaf for leaf in leaves}

    def hides(call: CallRecord) -> bool:
        return bool(call.opaque) or any(
            call.start < record.born <= call.end < record.last and all(site.moment != call.end for site in record.sites)
            for record in values
        )

    def visit(call: CallRecord) -> None:
        for inner in call.inner:
            if not inner.free:
                is_leaf = id(inner) in ends  # nothing inside of it can be skipped instead
                calls.append(Call(inner.name, inner.start, inner.end, bool(inner.opaque) if is_leaf else hides(inner)))
                if not is_leaf:
                    visit(inner)

    visit(recording.root)
    return tuple(calls)


def _assign_tensors(
    model: nn.Module,
    recording: Recording,
    leaves: Sequence[CallRecord],
    moments: Sequence[int],
    state: Sequence[TensorRecord],
) -> list[list[str]]:
    """The parameters and buffers of each layer; those that nothing reads belong to the first."""
    names: list[dict[str, None]] = [{} for _ in moments]

    def layer_at(moment: int) -> int:
        return max(bisect_right(moments, moment) - 1, 0)

    for leaf in leaves:
        layer_names = names[layer_at(leaf.start)]
        prefix = f"{leaf.path}." if leaf.path else ""
        for tensors in (leaf.module.named_parameters, leaf.module.named_buffers):
            layer_names.update({prefix + name: None for name, _ in tensors(remove_duplicate=False)})
    for record in state:
        for moment, _ in record.reads if record.depends else ():
            names[layer_at(moment)][record.state] = None
    for record in recording.tensors:
        for source in record.sources:
            for moment in record.uses if source.startswith(":") else ():
                # Every stage repeats what the forward decides by numbers.
                at = range(len(names)) if moment == END else [layer_at(moment)]
                for layer in at:
                    names[layer][source[1:]] = None
    listed = {name for layer_names in names for name in layer_names}
    all_tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    listed_ids = {id(all_tensors[name]) for name in listed}
    names[0].update({name: None for name, tensor in all_tensors.items() if id(tensor) not in listed_ids})
    return [list(layer_names) for layer_names in names]


def _find_ties(
    model: nn.Module, leaves: Sequence[CallRecord], moments: Sequence[int], names: Sequence[Sequence[str]]
) -> Ties:
    changed_by_forward: dict[int, set[int]] = defaultdict(set)
    for leaf in leaves:
        layer = max(bisect_right(moments, leaf.start) - 1, 0)
        for module in leaf.module.modules():
            # Its statistics are written inside of one function, which a record does not show.
            if isinstance(module, _NormBase) and module.running_mean is not None:
                changed_by_forward[id(module)].add(layer)
    every = dict(model.named_parameters(remove_duplicate=False))
    return group_ties([[every[name] for name in layer if name in every] for layer in names], changed_by_forward)


def group_ties(parameters: Iterable[Iterable[nn.Parameter]], changed_by_forward: Mapping[int, set[int]]) -> Ties:
    """Returns the groups of layers that share a trained parameter or state, and those of them that share state.

    Args:
        parameters: of each layer.
        changed_by_forward: state that changes without an update -> layers that use it.
    """
    users: dict[int, set[int]] = defaultdict(set)  # storage -> layers
    views: dict[int, set[int]] = defaultdict(set)  # storage -> its parameters
    for layer, of_layer in enumerate(parameters):
        for parameter in of_layer:
            if parameter.requires_grad:
                storage = parameter.untyped_storage()._cdata
                users[storage].add(layer)
                views[storage].add(id(parameter))
    apart = [group for storage, group in users.items() if len(views[storage]) > 1]  # their gradients cannot be summed
    inseparable = {tuple(sorted(group)) for group in (*changed_by_forward.values(), *apart) if len(group) > 1}
    groups = inseparable | {tuple(sorted(group)) for group in users.values() if len(group) > 1}
    return tuple(sorted(groups)), tuple(sorted(inseparable))


def _list_inputs(recording: Recording) -> list[TensorRecord]:
    """The model's inputs; their last use is that of anything computed from them alone."""
    last: dict[str, int] = {}
    for record in recording.tensors:
        for source in record.sources:
            last[source] = max([last.get(source, -1), *record.uses])
    inputs: dict[str, TensorRecord] = {}
    for record in recording.tensors:
        if (
            record.sites
            and record.sites[0].call == ""
            and record.sites[0].end == "in"
            and record.born == -1
            and not record.state
        ):
            (source,) = record.sources or ("",)
            record.last = last.get(source, -1)
            if source in inputs:  # another tensor of the same list
                nbytes = inputs[source].tensor.nbytes + record.tensor.nbytes
                record = replace(record, tensor=torch.empty(nbytes, dtype=torch.uint8, device="meta"))
            inputs[source] = record
    return list(inputs.values())


def _make_value(record: TensorRecord, cuts: Sequence[int]) -> Value | None:
    crossed = [cut for cut in cuts if _is_read_across(record, cut)]
    if not crossed:
        return None
    sites = tuple(site for site in record.sites if site.moment <= crossed[-1])
    return Value(record.tensor.nbytes, record.tensor.requires_grad, record.born, record.last, sites)


def _list_glue(state: Sequence[TensorRecord], leaves: Sequence[CallRecord]) -> tuple[str, ...]:
    """Parameters and buffers that are read outside leaf calls of the modules that hold them, or not at all.

    Where they are not owned they are placeholders, so that a batch that reads them on another stage is an error. Those
    of a call in a user's autograd function are listed too, because its backward may read them.
    """
    called = {id(tensor) for leaf in leaves for tensor in (*leaf.module.parameters(), *leaf.module.buffers())}
    in_function = {id(p) for leaf in leaves if leaf.whole == IN_FUNCTION for p in leaf.module.parameters()}
    unread = (record.state for record in state if not record.reads and id(record.tensor) not in called)
    names = [*unread, *(record.state for record in state if id(record.tensor) in in_function)]
    for record in state:
        for _, call in (*record.reads, *record.looks):
            inner = any(not inner_call.free for inner_call in call.inner)
            holds_it = any(record.tensor is tensor for tensor in [*call.module.parameters(), *call.module.buffers()])
            if inner or not holds_it or call.free:
                names.append(record.state)
                break
    return tuple(dict.fromkeys(names))
