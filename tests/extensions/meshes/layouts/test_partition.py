"""Tofu's partition: its published costs, each cut against exhaustive search, its baselines and its refusals."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from marks import few

import pipedream as pd
from pipedream.extensions.meshes.layouts.search import partition, search
from tests.extensions.meshes.layouts.steps import steps


def square_layers(layers: int, batch: int, width: int) -> pd.Operators:
    """Returns one step of a multilayer perceptron."""
    sizes = {f"d{layers}": (batch, width), "x0": (batch, width)}
    text = []
    for at in range(1, layers + 1):
        sizes |= {f"x{at}": (batch, width), f"d{at - 1}": (batch, width), f"w{at}": (width, width)}
        sizes[f"g{at}"] = sizes[f"w{at}"]
        text.append(f"x{at}[b, o] += x{at - 1}[b, i] * w{at}[i, o]")
    for at in range(layers, 0, -1):
        text.append(f"g{at}[i, o] += x{at - 1}[b, i] * d{at}[b, o]")
        text.append(f"d{at - 1}[b, i] += d{at}[b, o] * w{at}[i, o]")
    return pd.Operators(sizes, "\n".join(text), tuple((f"w{at}", f"g{at}") for at in range(1, layers + 1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "first", "four", "eight", "joint"),
    [
        ((4, 512, 8192), 25_165_824, 58_720_256, 109_051_904, 109_051_904),
        ((4, 4096, 4096), 100_663_296, 218_103_808, 360_710_144, 343_932_928),
        ((4, 8192, 1024), 8_388_608, 25_165_824, 58_720_256, 54_525_952),
    ],
)
def test_square_layers(sizes: tuple[int, int, int], first: int, four: int, eight: int, joint: int) -> None:
    ops = square_layers(*sizes)
    result = pd.partition(ops, 8)
    assert (result.cuts[0].elements, result.elements, result.at_least) == (first, eight, joint)
    assert pd.partition(ops, 8, "joint").elements == joint
    weights = sizes[0] * sizes[2] ** 2
    for ranks, least in ((2, first), (4, four)):
        assert pd.partition(ops, ranks).elements == least
        assert pd.partition(ops, ranks, "data", batch="b").elements == 2 * (ranks - 1) * weights
        others = partition.METHODS.keys() - {"joint", "recursive", "data"}
        assert all(pd.partition(ops, ranks, method).elements >= least for method in others)


def test_ties_are_followed_to_the_cheapest_end() -> None:
    """Of 16 cheapest first cuts some lead to 226,492,416 elements, and some to 234,881,024."""
    assert pd.partition(square_layers(4, 4096, 4096), 4).elements == 218_103_808


BOX = (range(8), range(6))


@pytest.mark.parametrize(
    ("source", "target", "elements"),
    [
        (search.Halves(BOX, BOX, BOX, is_pending=True), search.halve_tensor(BOX, 0), 48),
        (search.Halves(BOX, BOX, BOX, is_pending=True), search.halve_tensor(BOX, None), 96),
        (search.halve_tensor(BOX, None), search.halve_tensor(BOX, 1), 0),
        (search.halve_tensor(BOX, 0), search.halve_tensor(BOX, 1), 24),
        (search.halve_tensor(BOX[:1], 0), search.halve_tensor(BOX[:1], 0), 0),
        (search.halve_tensor(BOX, 0), search.halve_tensor(BOX, None), 48),
        (search.halve_tensor((range(4), range(6)), None), search.halve_tensor(BOX, None), 24),
        (search.halve_tensor((range(7), range(6)), 0), search.halve_tensor((range(7), range(6)), None), 8400),
    ],
)
def test_published_costs(source: search.Halves, target: search.Halves, elements: int) -> None:
    assert search.count_moved(source, target) == elements


def test_a_halo_is_fetched() -> None:
    ops = pd.Operators({"x": (8, 64), "k": (3,), "y": (8, 64)}, "y[n, h] += x[n, h + r - 1] * k[r]")
    only = search.Halving({"x": 1, "k": None, "y": 1}, ("h",))
    assert search.Search(ops).count_elements(search.State.uncut(ops), only) == 2 * 8  # a column from each side


def exhaustive(ops: pd.Operators, state: search.State) -> float:
    """Returns the least cost of one cut, from all schemes of the tensors; each operator takes its cheapest index."""

    def of_step(number: int, schemes: dict[str, Any]) -> float:
        step, ranges = ops.steps[number], state.ranges[number]
        choices = []
        for index in search.list_choices(ops, number, ranges):
            total = 0
            for access in step.accesses:
                rest = search.halve_tensor(state.boxes[access.tensor], schemes[access.tensor])
                is_result = access is step.output
                use = search.halve_access(access, ops.tensors[access.tensor], ranges, index, is_result=is_result)
                total += search.count_moved(use, rest) if is_result else search.count_moved(rest, use)
            choices.append(total)
        return min(choices)

    group = {name: at for at, names in enumerate(ops.groups) for name in names}
    choices_of_groups = [[None, *range(len(ops.tensors[names[0]]))] for names in ops.groups]
    return min(
        sum(of_step(number, {name: choices_made[at] for name, at in group.items()}) for number in range(len(ops.steps)))
        for choices_made in product(*choices_of_groups)
    )


@pytest.mark.parametrize("most", [5, pytest.param(99, marks=[pytest.mark.slow, pytest.mark.long])])
@settings(max_examples=10)
@given(data=st.data())
def test_each_cut_equals_exhaustive_search(most: int, data: st.DataObject) -> None:
    ops = data.draw(steps.filter(lambda ops: len(ops.tensors) <= most))
    state = search.State.uncut(ops)
    for _ in range(2):
        least, choices = search.Search(ops).find_cheapest(state)
        assert least == exhaustive(ops, state)
        (choice,) = next(choices)
        assert search.Search(ops).count_elements(state, choice) == least
        state = state.after(choice)


def test_samples_in_a_merged_dimension_are_not_cut() -> None:
    ops = pd.Operators(
        {"m": (16, 2), "v": (4, 4, 2), "x": (4, 2), "y": (4, 4, 2)},
        """v[a, b, c] = m[4*a + b, c]
           y[a, b, c] = f(v[a, b, c], x[b, c])""",
    )
    for batch in ("x", "b"):
        (cut,) = pd.partition(ops, 2, "data", batch=batch).cuts
        assert cut.indices == (None, "b"), "halves of b would need more of m in common than of their own"


@settings(max_examples=10)
@given(steps, st.data())
def test_a_partition_is_completed_around_given_schemes(ops: pd.Operators, data: st.DataObject) -> None:
    original = pd.partition(ops, 4)
    schemes = {name: tuple(cut.schemes[name] for cut in original.cuts) for name in ops.tensors}
    given_some = {name: schemes[name] for name in data.draw(st.sets(st.sampled_from(sorted(ops.tensors))))}
    again = partition.complete_partition(ops, 4, given_some)
    assert again.cuts[0].elements == original.cuts[0].elements, "the first cut is the cheapest with these schemes"
    assert all(again.cuts[at].schemes[name] == schemes[at] for name, schemes in given_some.items() for at in range(2))
    whole = partition.complete_partition(ops, 4, dict.fromkeys(ops.tensors, (None, None)))
    assert all(scheme is None for cut in whole.cuts for scheme in cut.schemes.values())
    assert whole.cuts[0].elements >= original.cuts[0].elements


@few
@given(steps)
def test_no_method_is_better(ops: pd.Operators) -> None:
    """Than the recursion in a single cut, than all cuts at once in several."""
    best, joint = pd.partition(ops, 2), pd.partition(ops, 4, "joint")
    for method in partition.METHODS.keys() - {"data"}:
        assert best.elements <= pd.partition(ops, 2, method).elements
        result = pd.partition(ops, 4, method)
        assert result.elements >= joint.elements
        assert result.at_least <= result.elements


def test_without_replicas_each_rank_has_a_part_of_everything() -> None:
    ops = square_layers(4, 512, 8192)
    result = pd.partition(ops, 4, replicate=False)
    assert all(scheme is not None for cut in result.cuts for scheme in cut.schemes.values())
    assert result.elements >= pd.partition(ops, 4).elements
    alone = pd.partition(ops, 1)
    assert (alone.cuts, alone.elements, alone.at_least) == ((), 0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 6}, r"over 6 ranks was asked for.*power of two"),
        ({"ranks": 2, "method": "recursiv"}, r"did you mean 'recursive'"),
        ({"ranks": 2, "method": "data"}, r"no operator has; give the index of the samples"),
        ({"ranks": 2, "batch": "n"}, r"method 'recursive' was asked for with the batch index 'n', which no operator"),
        ({"ranks": 2, "method": "data", "batch": "b", "replicate": False}, r"without replicas, but it keeps weights"),
        ({"ranks": 2**14, "method": "joint"}, r"all 14 cuts .* use 'recursive'"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(pd.PipelineError, match=message):
        pd.partition(square_layers(1, 4, 4), **arguments)
