"""The profile format of the original: read, written, and refused where it is damaged."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from paper_tables.graph_txt import GraphNode, GraphText

import pipedream as pd

TEXT = """\
node3 -- LSTM(8, 4) -- forward_compute_time=1.500, backward_compute_time=2.250, activation_size=[64.0; 8.0; 8.0], \
parameter_size=512.000
node1 -- Input0 -- forward_compute_time=7.000, backward_compute_time=0.000, activation_size=32.0, parameter_size=0.000
node4 -- __getitem__(0) -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=64.0, \
parameter_size=0.000 -- stage_id=1
\tnode1 -- node3
\tnode3 -- node4
"""
NODE = "a -- Add -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=3.0, parameter_size=4.0"

kinds = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=12).map(str.strip)
numbers = st.floats(0, 1e15, allow_subnormal=False)


@st.composite
def graphs(draw: st.DrawFn) -> GraphText:
    count = draw(st.integers(1, 6))
    nodes = []
    for i in range(count):
        kind = draw(kinds.filter(lambda kind: f"{kind} -- ".split(" -- ") == [kind, ""]))
        sizes = tuple(draw(st.lists(numbers, min_size=1, max_size=3)))
        stage = draw(st.none() | st.integers(0, 9))
        nodes.append(GraphNode(f"node{i}", kind, draw(numbers), draw(numbers), sizes, draw(numbers), stage))
    order = draw(st.permutations(range(count)))
    edges = [(order[i], order[i + 1]) for i in range(count - 1)]  # each node has one, as in a file that is whole
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    if pairs:
        edges += [(order[a], order[b]) for a, b in draw(st.lists(st.sampled_from(pairs), max_size=4))]
    return GraphText(tuple(nodes), tuple(draw(st.permutations(edges))))


@given(graphs())
def test_written_and_read_again_it_is_the_same(graph: GraphText) -> None:
    assert GraphText.parse(str(graph)) == graph
    assert GraphText.parse(f"{graph}\n".replace("\n", "\n\n")) == graph


def test_the_text_of_a_profile(tmp_path: Path) -> None:
    """Loaders are none of its layers, and a layer's bytes are those of all its outputs."""
    graph = GraphText.parse(TEXT)
    assert [(node.name, node.stage) for node in graph.nodes] == [("node3", None), ("node1", None), ("node4", 1)]
    assert graph.edges == ((1, 0), (0, 2))
    assert GraphText.load(graph.save(tmp_path / "graph.txt")) == graph
    assert "activation_size=[64.000; 8.000; 8.000], parameter_size=512.000\n" in str(graph)
    profile = graph.profile("lstm")
    rows = [(layer.name, layer.kind) for layer in profile.graph.layers]
    assert rows == [("node3", "LSTM(8, 4)"), ("node4", "__getitem__(0)")]
    assert (profile.model, profile.graph.edges) == ("lstm", ((0, 1),))
    assert profile.layers[0] == pd.LayerProfile(0.0015, 0.00225, 80, 512, 80)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no node"),
        (f"{NODE}\n{NODE}", "line 2: a is already defined on line 1"),
        (NODE.replace("1.0", "nan"), "line 1: forward_compute_time should be a number, found 'nan'"),
        (NODE.replace("2.0", "-2.0"), "line 1: backward_compute_time should be a number from 0 to 1e.15, found -2.0"),
        (f"{NODE}\n\ta -- b\n", "line 2: the edge names 'b', which no earlier line defines"),
        (f"{NODE}\n\ta -- a\n", "line 2: the edges form a cycle through a"),
        (TEXT[: TEXT.index("\tnode1")], "line 1: node3 has no edge in or out, is the end of the file missing"),
        (NODE[1:], "line 1: a node has 3 or 4 parts between ' -- ', found 2"),
        (None, "cannot read the graph"),
    ],
)
def test_damage_is_named_with_its_line(text: str | None, says: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "graph.txt").write_text(text, encoding="utf-8")
    with pytest.raises(pd.PipelineError, match=says) as error:
        GraphText.load(tmp_path / "graph.txt")
    assert str(tmp_path / "graph.txt") in str(error.value)
