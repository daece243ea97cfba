"""`pipedream layers`: the layers of a model, and what crosses between them."""

from pathlib import Path

import pytest
from commands import Answer, Refused, Run

import pipedream as pd
from pipedream.core.model.graph import Call, Value, ValueSite, layer_table

CHAIN = """
import torch
from torch import nn
import pipedream

def recipe():
    batch = (torch.randn(8, 4), torch.randn(8, 2))
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    return pipedream.Recipe(model, nn.MSELoss(), lambda named: torch.optim.SGD([p for _, p in named]), [batch])
"""


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    (tmp_path / "chain.py").write_text(CHAIN, encoding="utf-8")
    return tmp_path / "chain.py"


def test_the_command_lists_a_chain(chain: Path, run_command: Run, answer: Answer) -> None:
    status, out, err = run_command("layers", chain)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "   layer  kind      sent  returned  what crosses the cut before it",
        "0  0      Linear       -         -",
        "1  1      Dropout  192 B     192 B  0 output",
        "2  2      Linear   192 B     192 B  1 output",
    ]
    report = answer("layers", chain)
    first, second, third = report.pop("layers")
    assert report == {"chain": True, "ties": [], "inseparable": [], "refused": {}}
    assert (first["sent_bytes"], second["sent_bytes"], second["returned_bytes"]) == (None, 192, 192)
    assert second["crossing"] == [{"name": "0 output", "bytes": 192, "gradient": True}]
    assert (third["name"], third["kind"], third["parameters"]) == ("2", "Linear", ["2.weight", "2.bias"])


def test_command_refuses_what_does_not_run(tmp_path: Path, chain: Path, refused: Refused) -> None:
    chain.write_text(CHAIN.replace("nn.Linear(6, 2)", "nn.Linear(5, 2)"), encoding="utf-8")
    assert "8x6 and 5x2" in refused("layers", chain)
    assert "does not exist" in refused("layers", tmp_path / "none.py")


def test_table_names_ties_and_what_cannot_be_cut() -> None:
    calls = tuple(Call(name, start, start + 1) for start, name in ((0, "a"), (2, "b"), (4, "c"), (6, "c@2")))
    values = (
        Value(100, True, 1, 5, (ValueSite("a", "out", "", 1),)),
        Value(4000, False, -1, 7, (ValueSite("", "in", "labels", -1),)),
        Value(8, True, 3, 4, (ValueSite("b", "in", "0/x", 2),)),
    )
    layers = tuple(pd.Layer(call.name, "Linear") for call in calls)
    graph = pd.LayerGraph(layers, ((0, 1), (1, 2), (2, 3)), ((0, 3), (2, 3)), ((2, 3),), calls=calls, values=values)
    refused = {"b.inner": "it runs compiled code"} | {f"b.{i}": "b is called 30 times in a loop" for i in range(30)}
    lines = layer_table(graph, refused).splitlines()
    assert lines[:5] == [
        "   layer  kind       sent  returned  what crosses the cut before it",
        "0  a      Linear        -         -",
        "1  b      Linear  4.10 kB     100 B  a output, input labels",
        "2  c      Linear  4.11 kB     108 B  a output, input labels, 1 more",
        "3  c@2    Linear  4.00 kB         -  input labels",
    ]
    assert lines[5].startswith("a, c@2: share a weight; only methods whose stages all make the same updates")
    assert lines[6].startswith("c, c@2: share state")
    assert lines[7] == "no cut before b.inner: it runs compiled code"
    assert lines[-1] == "and no cut before 11 more calls"
