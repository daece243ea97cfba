"""Meshes and layouts: which rank has which part of a tensor, and what is refused."""

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import pytest
from drawn import MESHES, placements
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream import Cluster, Layout, Level, Mesh, Operators, Plan
from pipedream.core.box import box_of, dense_strides, memory_order
from pipedream.core.plan.ranks import meshes_of
from pipedream.extensions.meshes import layout as layouts, workers
from pipedream.extensions.meshes.layouts.search import exchanges, partition

Boundary, Crossing = layouts.Boundary, layouts.Crossing
Move = tuple[tuple[int, ...], Mesh, tuple[int | None, ...], Mesh, tuple[int | None, ...]]


@st.composite
def moves(draw: st.DrawFn) -> Move:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    sender, receiver = draw(MESHES), draw(MESHES)
    return shape, sender, placements(draw, sender, len(shape)), receiver, placements(draw, receiver, len(shape))


def parts(shape: tuple[int, ...], cuts: tuple[int | None, ...], mesh: Mesh) -> list[set[tuple[int, ...]]]:
    """Returns the elements of each rank."""
    return [{*product(*box_of(shape, cuts, list(mesh.dimensions.values()), at))} for at in mesh.coordinates()]


@given(moves())
def test_each_rank_receives_its_part_once_from_ranks_that_have_it(move: Move) -> None:
    shape, sender, sent, receiver, received = move
    has, wants = parts(shape, sent, sender), parts(shape, received, receiver)
    got: list[list[tuple[int, ...]]] = [[] for _ in wants]
    for piece in layouts.pieces(shape, sender, sent, receiver, received):
        elements = {*product(*piece.box)}
        assert elements <= has[piece.sender]
        got[piece.receiver] += elements
    assert [sorted(row) for row in got] == [sorted(row) for row in wants]


@given(st.permutations(range(4)), st.lists(st.integers(2, 5), min_size=4, max_size=4), st.integers(0, 4))
def test_a_part_tells_the_order_in_memory_of_its_whole(order: list[int], part: list[int], single: int) -> None:
    """Also where a dimension of the part has a single element."""
    part[single:] = [1, *part[single:]][: len(part[single:])]
    whole = [4 * size for size in part]
    strides = dense_strides(part, order)
    assert dense_strides(whole, memory_order(part, strides)) == dense_strides(whole, order)
    assert sorted(strides, reverse=True) == [strides[dim] for dim in order]
    assert memory_order((2, 3), (0, 1)) == memory_order((3, 2), (1, 0)) == (0, 1), "expanded, as if not transposed"


def test_a_mesh_is_read_from_text_and_sends_its_like_nothing_to_other_places() -> None:
    mesh = Mesh(" data:2, model:4 ")
    assert (mesh.size, mesh.dimensions, str(mesh)) == (8, {"data": 2, "model": 4}, "data:2,model:4")
    assert mesh.coordinates()[5] == (1, 1)
    assert (Mesh().size, Mesh().dimensions, str(Mesh())) == (1, {}, "-")
    sent = {(piece.sender, piece.receiver) for piece in layouts.pieces((8, 8), mesh, (0, None), mesh, (0, None))}
    assert sent == {(rank, rank) for rank in range(8)}


@pytest.mark.parametrize(
    ("rules", "names", "shape", "mesh", "expected"),
    [
        ("batch:data, d_ff:model", "batch length d_model", (16, 128, 512), "data:2,model:2", (0, None)),
        ("batch:data, d_ff:model", "d_ff d_model", (2048, 512), "data:2,model:2", (None, 0)),
        ("batch:data, d_ff:model", "d_ff d_model", (2048, 512), "data:2", (None,)),
        ("batch:b, vocab:m, heads:m", "vocab d_model", (96, 8), "b:4,m:8", (None, 0)),
        ("", "batch", (3,), "", ()),
    ],
)
def test_placements(rules: str, names: str, shape: tuple[int, ...], mesh: str, expected: tuple[int, ...]) -> None:
    assert Layout(rules).placements(names, shape, Mesh(mesh)) == expected


def test_a_dimension_that_does_not_divide_is_cut_as_torch_chunks() -> None:
    boxes = [box_of((5,), (0,), (4,), at) for at in Mesh("data:4").coordinates()]
    assert [list(box[0]) for box in boxes] == [[0, 1], [2, 3], [4], []]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_cuts_into_halves_may_cut_a_dimension_again(shape: list[int], data: st.DataObject) -> None:
    """The ranks of a mesh cut1:2,cut2:2 have what those of a partition have."""
    cuts = data.draw(st.lists(st.sampled_from([None, *range(len(shape))]), min_size=1, max_size=3))
    letters = ", ".join("abc"[: len(shape)])
    ops = Operators({"x": shape, "y": shape}, f"y[{letters}] = f(x[{letters}])")
    layout = partition.complete_partition(ops, 2 ** len(cuts), {"x": cuts})
    mesh = Mesh(",".join(f"cut{at + 1}:2" for at in range(len(cuts))))
    for place, box in zip(mesh.coordinates(), exchanges.Exchanges(ops, layout).stored["x"], strict=True):
        assert list(map(list, box_of(shape, cuts, [2] * len(cuts), place))) == list(map(list, box))


UP = Operators({"x0": (4, 8), "p_up_weight": (16, 8), "y": (4, 16)}, "y[b, o] += x0[b, i] * p_up_weight[o, i]")
FOUND = pd.partition(UP, 4)


def test_a_layout_that_was_found() -> None:
    layout, two, four = Layout.of(FOUND), Mesh("cut1:2"), Mesh("cut1:2,cut2:2")
    cuts = layout.cuts["p_up_weight"]
    assert cuts == tuple(cut.schemes["p_up_weight"] for cut in FOUND.cuts)
    assert layout.parameter("up.weight", (16, 8), four) == cuts
    assert layout.parameter("up.weight", (16, 8), two) == cuts[:1]
    assert layout.parameter("other", (16, 8), four) == (None, None)
    assert layout.boundary(None, (8, 3), 8, four) == (0, 0)
    assert layout.boundary(None, (6, 3), 6, four) == (None, None), "a batch that four ranks do not divide"
    assert (layout.rules_on(two), layout.rules_on(Mesh("data:2"))) == ("found", "")
    both = Layout("batch:data", cuts=layout.cuts)
    meshes = {mesh.text: why for mesh, why in both.candidates({"up.weight": (16, 8)}, 8, 4).items()}
    assert meshes == {"data:2": "", "data:4": "", "cut1:2": "", "cut1:2,cut2:2": ""}


def test_names_are_found_by_name_and_by_pattern() -> None:
    names = {"*.up.weight": "d_ff d_model", "head.up.weight": "vocab d_model", "blocks.3:out": "batch"}
    of_layers = map(Layout(names=names).names_of, ("blocks.0.up.weight", *list(names)[1:], "blocks.0.up.bias"))
    assert list(of_layers) == [*names.values(), None]


def check_found(mesh: str, **layout: Any) -> None:
    Layout(**{"cuts": Layout.of(FOUND).cuts} | layout).check(["up.weight"], ["up"], [Mesh(mesh)])


def place(names: str, shape: tuple[int, ...], rules: str) -> None:
    Layout(rules).placements(names, shape, Mesh("m:2"), "the w")


TWO_MACHINES = Cluster((Level(2, 1e10), Level(2, 1e9)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Mesh("model"), "'model', which is not a name and a size"),
        (lambda: meshes_of("model:2/-", 3), "the meshes 'model:2/-' are for 2 stages, but there are 3"),
        (lambda: Plan.uniform(2, order=(0, 0)).with_mesh("model:2/-"), "worker 0 has several stages, with the meshes"),
        (lambda: Mesh("model:0"), "not a name and a size"),
        (lambda: Mesh("model:2,model:2"), "'model' twice"),
        (lambda: Layout("d_ff"), "'d_ff', which is not a rule"),
        (lambda: Layout("d_ff:data, d_ff:model"), "d_ff:data and d_ff:model"),
        (lambda: place("a b", (4, 4), "a:m, b:m"), r"the w \(a b\) would be sharded twice over .m., by the rules a:m"),
        (lambda: place("a b", (5, 4), "a:m"), "the w has 5 of 'a', which m:2 of the mesh does not divide"),
        (lambda: place("a", (5, 4), ""), r"the w has 1 names \(a\), but 2"),
        (lambda: Layout("a:m", names={"*.upp": "a b"}).check(["0.up"], ["0"], []), r"'\*.upp', .* did you mean '0.up'"),
        (lambda: Layout("d_fff:m", names={"up": "d_ff"}).check(["up"], [], []), "d_fff:m, but .* did you mean 'd_ff'"),
        (lambda: Layout("a:data", shard_weights="dta").check([], [], [Mesh("data:2")]), "did you mean 'data'"),
        (lambda: Layout("a:m").check([], [], [Mesh("m:2,n:2")]), "the dimension 'n', which no rule uses"),
        (lambda: check_found("cut1:4"), "such as cut1:2,cut2:2, without shard_weights; found cut1:4"),
        (lambda: check_found("data:2,cut1:2"), "found data:2,cut1:2; use such a mesh, and replicas"),
        (lambda: check_found("cut1:2", shard_weights="cut1"), "found cut1:2 and shard_weights='cut1'"),
        (lambda: check_found("cut1:2", cuts={"w": (0,)}), "found for the tensors w, none of which is a parameter"),
        (lambda: Layout(cuts={"p_w": (0, 0)}).parameter("w", (6, 8), Mesh("cut1:2,cut2:2")), "shards dimension 0 of"),
        (lambda: workers.of_meshes(Cluster.flat(3), 2), "workers of 2 ranks each were .*, but the cluster joins 3"),
        (lambda: workers.of_workers(TWO_MACHINES, [1, 2, 1]), "a worker of 2 ranks from rank 1 .* would be in parts"),
    ],
)
def test_what_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(pd.PipelineError, match=words):
        make()


@pytest.mark.parametrize(
    ("joined", "widths"),
    [
        (workers.of_meshes(Cluster.flat(8), 2), [(4, ())]),
        (workers.of_meshes(Cluster((Level(4, 1e10), Level(2, 1e9))), 2), [(2, ()), (2, ())]),
        (workers.of_meshes(Cluster((Level(2, 1e10), Level(4, 1e9))), 4), [(2, ())]),
        (workers.of_workers(Cluster((Level(8, 1e9),)), [1, 4, 1, 2]), [(4, ())]),
        (workers.of_workers(Cluster((Level(4, 1e10), Level(2, 1e9))), [2] * 4), [(2, ()), (2, ())]),
        (workers.of_workers(Cluster((Level(4, 1e10), Level(2, 1e9))), [1, 1, 2, 4]), [(3, (3, 1)), (2, ())]),
        (workers.of_workers(Cluster((Level(2, 1e10), Level(4, 1e9))), [4, 1, 1, 2]), [(2, (1, 2, 1)), (3, ())]),
    ],
)
def test_a_cluster_of_workers_of_several_ranks(joined: Cluster, widths: list[tuple[int, tuple[int, ...]]]) -> None:
    assert [(level.width, level.sizes) for level in joined.levels] == widths


@given(moves())
def test_bytes_of_the_busiest_rank_at_a_boundary(move: Move) -> None:
    """At most what it really sends or receives either way, its pieces being of one byte each; that, if all do alike."""
    shape, sender, sent, receiver, received = move
    busiest = 0
    shares: set[int] = set()
    for giver, cut, other, other_cut in ((sender, sent, receiver, received), (receiver, received, sender, sent)):
        gives, gets = [0] * giver.size, [0] * other.size
        for piece in layouts.pieces(shape, giver, cut, other, other_cut):
            size = prod(map(len, piece.box))
            gives[piece.sender] += size
            gets[piece.receiver] += size
        busiest = max(busiest, *gives, *gets)
        shares |= {len(set(gives)), len(set(gets))}
    sizes = [len(parts(shape, cuts, mesh)[0]) for mesh, cuts in ((sender, sent), (receiver, received))]
    predicted = layouts.boundary_bytes(sender.size, sizes[0], receiver.size, sizes[1])
    if shares == {1}:
        assert predicted == busiest
    cuts = zip((*sent, *received), (*sender.dimensions.values(), *receiver.dimensions.values()), strict=True)
    if all(cut is None or shape[cut] % size == 0 for cut, size in cuts):
        assert predicted <= busiest


def test_each_stage_may_have_a_mesh() -> None:
    plan = Plan.uniform(3, replicas=(2, 1, 1)).with_mesh("data:2/model:2/-")
    plan = plan.with_layout(Layout("batch:data, d_ff:model"))
    assert (plan.workers, plan.ranks, plan.config) == (4, 7, "2x2-1x2-1")
    assert [stage.layout for stage in plan.stages] == ["batch:data", "d_ff:model", ""]
    assert Plan.from_json(plan.to_json()) == plan
    assert [mesh.size for mesh in plan.placement.meshes(plan.meshes)] == [2, 2, 2, 1]


def test_the_cut_of_a_boundary() -> None:
    layout = Layout("batch:data, d_model:model", names={"blocks.3:out": "batch length d_model"})
    named = Boundary(layout, "blocks.3", Mesh("data:2,model:2"), Mesh("model:2"))
    two = [Crossing((4, 3, 8), (0, 2), (2,)), Crossing((4,), (0, None), (None,))]
    assert named.crossings([(4, 3, 8), (4,)], 4) == two
    assert named.crossings([(3, 3, 8)], 3) == [Crossing((3, 3, 8), (None, 2), (2,))]  # a smaller last batch
    three = [Crossing((4, 3, 8), (0,), ()), Crossing((7, 8), (None,), ()), Crossing((), (None,), ())]
    assert Boundary(layout, "blocks.2", Mesh("data:2"), Mesh()).crossings([(4, 3, 8), (7, 8), ()], 4) == three
    with pytest.raises(pd.PipelineError, match=r"the output of .blocks\.3. has 7 of 'd_model', which model:2"):
        named.crossings([(4, 3, 7)], 4)


@given(st.lists(moves(), max_size=3), st.sampled_from(["", '["l",["t",0]]', '"a|b"']))
def test_cuts_travel_in_the_structure(tensors: list[Move], structure: str) -> None:
    cuts = tuple(Crossing(row, sent, got, tuple(reversed(range(len(row))))) for row, _, sent, _, got in tensors)
    assert layouts.read_crossings(layouts.with_crossings(structure, cuts)) == (cuts, structure)
