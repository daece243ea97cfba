"""Operators as text: what is read, and what is refused with its place."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.core.box import box_of
from pipedream.extensions.meshes.layouts.description.text import read_lines
from tests.extensions.meshes.layouts.steps import steps

SIZES = {"x": (8, 6), "w": (6, 4), "y": (8, 4), "p": (2, 3, 8, 8), "k": (5, 3, 3, 3), "q": (2, 5, 8, 8), "loss": ()}


def test_the_parts_of_a_line() -> None:
    (line,) = read_lines("\n  y[b, o] += f(x[b, i], 2) * w[i, o] - x[b, i]  # a comment\n")
    assert (line.number, line.reduction, line.text) == (2, "+", "y[b, o] += f(x[b, i], 2) * w[i, o] - x[b, i]")
    assert {access.tensor: access.column for access in (line.output, *line.operands)} == {"y": 3, "x": 16, "w": 30}
    assert [index.plain for index in line.operands[1].indices if index] == ["i", "o"]


@given(
    st.dictionaries(st.sampled_from("hrsx"), st.integers(-4, 4).filter(bool), min_size=1),
    st.integers(-9, 9),
    st.sampled_from(["", "+", "*", "max", "min"]),
    st.data(),
)
def test_affine_indices_are_pythons(terms: dict[str, int], offset: int, reduction: str, data: st.DataObject) -> None:
    parts = [f"{times} * {name}" if times > 0 else f"({times}) * {name}" for name, times in terms.items()]
    text = " + ".join(data.draw(st.permutations([*parts, f"({offset})"])))
    (line,) = read_lines(f"y[a] {reduction}= x[{text}, :]")
    (index, whole) = line.operands[0].indices
    assert (line.reduction, dict(index.terms), index.offset, whole) == (reduction, terms, offset, None)


def test_groups_inputs_and_outputs(tmp_path: Path) -> None:
    sizes = SIZES | {"g": (6, 4), "v": (6, 4)}
    ops = pd.Operators(sizes, "y[b, o] += x[b, i] * w[i, o]\nloss[] += y[b, o]", alike=(("w", "g"), ("v", "g")))
    assert set(ops.groups) == {(name,) for name in SIZES if name != "w"} | {("v", "w", "g")}
    assert (ops.outputs, {"x", "w"} <= set(ops.inputs)) == (("loss",), True)
    assert pd.Operators.load(ops.save(tmp_path / "operators.json")) == ops


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss[] += x[b, o]; x = w", "should be alike, but differ in size"),
        ("loss[] += x[b, o]; x = u", "alike has the tensor 'u'"),
        ("y[b, o] x[b, o]", r"line 1, column 1 of the operators: .* is not a result"),
        ("\n  y[b, o] += x[b, i] * ", r"line 2, column \d+ of the operators: .* cannot be read"),
        ("y[b, o] += x[b, i] * w", r"column 22 .* has 'w' without indices"),
        ("y[b, o] += x[b, i*o]", r"column 17 .* has the index 'i \* o'; write sums"),
        ("y[b, o] += x[b, i] if 1 else 2", r"column 12 .* not a tensor or a function"),
        ("y[b, o] = y2[b, o]", r"line 1, column 11 .*the tensor 'y2', whose sizes are not given; did you mean 'y'"),
        ("y[b, o] += x[b, i] * w[o, i]", r"'o' .* has two sizes, 4 in 'y' and 6 in 'w'"),
        ("y[b, o] = x[b, i]", r"the index 'i' only on the right; reduce it"),
        ("y[b] = x[b, :]", r"'y' has 1 indices .* but 2 dimensions"),
        ("loss[] += p[n, c, 2*h + r, :]", r"the size of 'h' .* is not known"),
        ("y[b, :] = x[b, :] where b < 3", r"'b' .* has two sizes, 3 in 'where' and 8 in 'y'"),
        ("y[b, :] = x[b, :] where c < 3", r"says c < 3, but has no such index"),
        ("y[b, :] = x[b, :] where", r"has '' after `where`"),
        ("y[b, :] = x[b, :]\ny[b, o] = f(x[b, :])", r"'y' is computed in the lines 1 and 2"),
        ("y[b, :] = x[b, :]\nx[b, :] = y[b, :]", r"'x' is read in line 1 .* and computed in line 2"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    text, _, alike = text.partition("; ")
    with pytest.raises(pd.PipelineError, match=message):
        _ = pd.Operators(SIZES, text, (tuple(alike.split(" = ")),) if alike else ())


MESH = pd.Mesh("m:2,n:2")


@pytest.mark.parametrize(
    ("text", "rules", "peak", "done", "moved"),
    [
        # x 8 x 6, w 6 x 4, y 8 x 4
        ("y[a, c] += x[a, b] * w[b, c]", "", 48 + 24 + 32, 4 * 192, {}),
        ("y[a, c] += x[a, b] * w[b, c]", "a:m", 24 + 24 + 16, 2 * 192, {}),
        ("y[a, c] += x[a, b] * w[b, c]", "a:m,c:n", 24 + 12 + 8, 192, {}),
        ("y[a, c] += x[a, b] * w[b, c]", "b:m", 24 + 12 + 32, 2 * 192, {("all-reduce", "m"): 4 * 32}),
        ("y[a, c] += x[a, b] * w[b, c]", "b:m,a:n", 12 + 12 + 16, 192, {("all-reduce", "m"): 4 * 16}),
        # s and t 8 x 8; a copy is there beside the tensor.
        ("t[a, b] = s[a, b]\nu[a, :] = f(t[a, :])", "b:m", 32 + 64 + 64, 6 * 64, {("all-gather", "m"): 4 * 64}),
        ("t[a, :] = s[a, :]\nu[a, b] = f(t[a, b])", "b:n", 64 + 32 + 64, 4 * 64 + 2 * 64, {}),
        ("t[a, b] = s[a, b]\nu[c, a] = t[c, a]", "a:m", 32 + 32 + 32, 4 * 64, {("all-to-all", "m"): 4 * 32}),
        ("t[a, b] = s[a, b]\nu[c, a] = t[c, a]", "a:m,c:n", 32 + 16 + 16, 3 * 64, {("all-to-all", "m"): 4 * 16}),
        ("t[a, b] = s[a, b]\nu[c, b] = t[c, b]", "c:n", 64 + 64, 4 * 64 + 2 * 64, {}),
        ("t[a, b] = s[a, b]\nu[c, b] = t[c, b]", "a:m,c:n", 32 + 32 + 32, 2 * 64 * 2, {("all-gather", "m"): 4 * 32}),
    ],
)
def test_a_report_by_hand(text: str, rules: str, peak: int, done: int, moved: dict[Any, int]) -> None:
    sizes = {name: shape for name, shape in SIZES.items() if name in "xwy" and f"{name}[" in text}
    sizes |= {name: (8, 8) for name in "stu" if f"{name}[" in text}
    ops = pd.Operators(sizes, text)
    report = ops.report(pd.Layout(rules), MESH)
    assert (report.peak, report.done, report.moved) == (peak, done, moved)
    assert report.unique == ops.report(pd.Layout(), pd.Mesh()).done


@given(steps, st.lists(st.sampled_from(["", "m", "n"]), min_size=6, max_size=6))
def test_a_report_is_the_sum_of_what_ranks_have_and_do(ops: pd.Operators, dimensions: list[str]) -> None:
    names = [name for name in "abcdef" if any(name in step.sizes for step in ops.steps)]
    layout = pd.Layout(",".join(f"{name}:{over}" for name, over in zip(names, dimensions, strict=False) if over))
    try:
        report = ops.report(layout, MESH)
    except pd.errors.PlanError:
        return
    stored_names = ops.named.stored_names
    last = {access.tensor: at for at, step in enumerate(ops.steps) for access in step.operands}
    computed = {step.result: at for at, step in enumerate(ops.steps)}

    def box(names: Any, shape: tuple[int, ...], rank: tuple[int, ...]) -> Any:
        return box_of(shape, layout.placements(" ".join(name or "-" for name in names), shape, MESH), (2, 2), rank)

    done, peaks = 0, []
    for rank in MESH.coordinates():
        for at, step in enumerate(ops.steps):
            elements = 0
            for name, shape in ops.tensors.items():
                if computed.get(name, 0) <= at <= last.get(name, len(ops.steps)):
                    elements += prod(map(len, box(stored_names[name], shape, rank)))
            uses = {(a.tensor, tuple(i.plain if i else None for i in a.indices)) for a in step.accesses}
            for tensor, indices in uses:
                shape = ops.tensors[tensor]
                mine = box([name if name in layout.over else None for name in indices], shape, rank)
                elements += prod(map(len, mine)) if mine != box(stored_names[tensor], shape, rank) else 0
            peaks.append(elements)
            whole = [
                prod(size for size, index in zip(ops.tensors[a.tensor], a.indices, strict=True) if index is None)
                for a in step.accesses
            ]
            done += max(whole) * prod(map(len, box(list(step.sizes), tuple(step.sizes.values()), rank)))
    assert report.done == done
    assert report.peak >= max(peaks)
    if not report.moved:  # a rank may keep its part of what is relaid
        assert report.peak == max(peaks)


def test_seconds() -> None:
    ops = pd.Operators({"x": (8, 6), "w": (6, 4), "y": (8, 4)}, "y[a, c] += x[a, b] * w[b, c]")
    report = ops.report(pd.Layout("b:m"), pd.Mesh("m:2,n:4"))
    assert report.moved == {("all-reduce", "m"): 8 * 32}
    assert report.seconds(10, {"m": 4, "n": 1}) == 96 / 10 + 2 * 1 / 2 * 32 / 4
    for rates, message in (({"m": 1}, r"no rate for 'n'"), ({"m": 1, "n": 1, "o": 1}, r"has 'o', which"), (0, r"is 0")):
        with pytest.raises(pd.PipelineError, match=message):
            report.seconds(1, rates)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("z:m", r"shards 'z', which is an index of no operator; they have"),
        ("b:m", r"shards 'b', which has size 6 .* over m:4, which does not divide it"),
        ("a:m,c:m", r"shards both 'a' and 'c' over 'm', but 'y\[a, c\] .*\(line 1\) has both"),
        ("h:m", r"shards 'h', but line 2, .* has it in an expression"),
        ("k:m", r"shards 'k', but line 3, .* has it in two dimensions of 'v'"),
    ],
)
def test_layouts_that_are_refused(rules: str, message: str) -> None:
    sizes = {"x": (8, 6), "w": (6, 4), "y": (8, 4), "u": (8,), "v": (8, 8), "t": (8,)}
    text = "y[a, c] += x[a, b] * w[b, c]\nu[h] = x[h + 0*h + 1, :]\nt[k] = v[k, k]"
    with pytest.raises(pd.PipelineError, match=message):
        pd.Operators(sizes, text).report(pd.Layout(rules), pd.Mesh("m:4"))
    assert pd.Operators(sizes, text).report(pd.Layout("a:other"), pd.Mesh("m:4")).moved == {}
