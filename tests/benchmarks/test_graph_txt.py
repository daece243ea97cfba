"""The profile format of the original: read and written."""

from pathlib import Path

from paper_tables.graph_txt import GraphText

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
