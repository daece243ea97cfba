"""Names of indices that all lines share: what they change, and what they do not."""

from hypothesis import given, settings, strategies as st

import pipedream as pd
from pipedream.extensions.meshes.layouts.description.text import rename_indices
from tests.extensions.meshes.layouts.steps import steps


@given(steps)
def test_only_names_change(ops: pd.Operators) -> None:
    shared = ops.with_shared_names()
    assert (shared.tensors, shared.alike) == (ops.tensors, ops.alike)
    for step, other in zip(ops.steps, shared.steps, strict=True):
        assert list(step.sizes.values()) == list(other.sizes.values())
        names = dict(zip(other.sizes, step.sizes, strict=True))  # as many: no two have become one
        assert rename_indices(other, names) == step.text
    mesh = pd.Mesh("m:2")
    without, before = shared.report(pd.Layout(), mesh), ops.report(pd.Layout(), mesh)
    assert (without.done, without.unique, without.moved) == (before.done, before.unique, before.moved)
    assert without.peak == before.peak


@settings(max_examples=10)
@given(steps)
def test_partitions_do_not_depend_on_names(ops: pd.Operators) -> None:
    first, other = pd.partition(ops, 4), pd.partition(ops.with_shared_names(), 4)
    assert [cut.elements for cut in first.cuts] == [cut.elements for cut in other.cuts]


@given(steps)
def test_names_differ_only_where_they_must(ops: pd.Operators) -> None:
    """An index and a dimension that it runs over have two names only if something would have one of them twice."""
    shared = ops.with_shared_names()
    owners = [{*step.sizes} for step in shared.steps]
    owners += [{name for name in names if name} for names in shared.named.stored_names.values()]
    used: dict[tuple[str, int], set[str]] = {}  # the names of each dimension
    first = {name: group[0] for group in shared.groups for name in group}
    for step in shared.steps:
        for access in step.accesses:
            for at, (index, size) in enumerate(zip(access.indices, shared.tensors[access.tensor], strict=True)):
                if name := step.outermost(index, size):
                    used.setdefault((first[access.tensor], at), set()).add(name)
    for (tensor, at), names in used.items():
        if names & shared.named.whole.keys():
            continue  # the dimension is named by another one while no operator uses it
        own_name = shared.named.stored_names[tensor][at]
        for name in names - {own_name} if own_name else ():
            assert any({name, own_name} <= owner for owner in owners)


@given(st.lists(st.integers(2, 4), min_size=2, max_size=3), st.integers(1, 3), st.integers(0, 2), st.booleans())
def test_only_blocks_of_rows_are_parts_when_merged(sizes: list[int], wrong: int, offset: int, is_short: bool) -> None:
    """The outermost index is the one whose parts are parts of the dimension; counted element by element."""
    letters, times = "abc"[: len(sizes)], [1] * len(sizes)
    for at in range(len(sizes) - 2, -1, -1):
        times[at] = times[at + 1] * sizes[at + 1]
    times[0] = times[0] * wrong
    text = " + ".join(f"{factor}*{name}" for factor, name in zip(times, letters, strict=True)) + f" + {offset}"
    whole = times[0] * sizes[0] + offset + is_short
    (step,) = pd.Operators({"x": tuple(sizes), "y": (whole,)}, f"x[{', '.join(letters)}] = f(y[{text}])").steps
    reads: dict[int, set[int]] = {}
    for at in range(sizes[0]):
        inner = {0}
        for factor, size in zip(times[1:], sizes[1:], strict=True):
            inner = {had + factor * value for had in inner for value in range(size)}
        reads[at] = {times[0] * at + value + offset for value in inner}
    block = whole // sizes[0]
    is_cut = whole % sizes[0] == 0 and all(reads[at] == {*range(at * block, (at + 1) * block)} for at in reads)
    (access,) = step.operands
    assert step.outermost(access.indices[0], whole) == ("a" if is_cut else None)
