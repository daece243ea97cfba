"""`pipedream layout`, over ranks and by name: from operators and from recipes, as text and as JSON."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipedream as pd
from pipedream.extensions.meshes.layouts import METHODS, Exchanges

PRODUCT = pd.Operators({"x": (10, 5), "y": (5, 20), "z": (10, 20)}, "z[a, c] += x[a, b] * y[b, c]")
LAYER = pd.Operators(
    {"x0": (64, 128), "w": (128, 128), "x1": (64, 128), "d1": (64, 128), "d0": (64, 128), "g": (128, 128)},
    """x1[b, o] += x0[b, i] * w[i, o]
       g[i, o] += x0[b, i] * d1[b, o]
       d0[b, i] += d1[b, o] * w[i, o]""",
    (("w", "g"),),
)
RunCommand = Callable[..., tuple[int, str, str]]

RECIPE = """
import torch
from torch import nn
import pipedream

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return {"loss": (self.inner(x) ** 2).mean()}

def recipe():
    batch = (torch.randn(256, 16), torch.randint(0, 4, (256,)))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    loss = nn.CrossEntropyLoss()
    return pipedream.Recipe(model, loss, lambda named: torch.optim.SGD([p for _, p in named], momentum=0.9), [batch])
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    PRODUCT.save("product.json")
    LAYER.save("layer.json")
    return tmp_path


def run(run_command: RunCommand, text: str) -> str:
    status, out, error = run_command(*text.split())
    assert (status, error) == (0, "")
    return out


def run_json(run_command: RunCommand, text: str) -> Any:
    return json.loads(run(run_command, f"{text} --json"))


@pytest.mark.parametrize("how", ["", "--method joint", "--no-replicate", "--method spartan", "--ranks 1"])
def test_partition_is_that_of_the_library(how: str, run_command: RunCommand) -> None:
    report = run_json(run_command, f"layout layer.json --ranks 4 {how} --batch b --element-bytes 2")
    ranks, replicate = report["ranks"], "no-rep" not in how
    assert ranks == (1 if "--ranks" in how else 4)
    assert report["method"] == (how.split()[1] if "--method" in how else "recursive")
    assert set(report["refused"]) == (set() if replicate else {"data"})
    for name, row in report["methods"].items():
        direct = pd.partition(LAYER, ranks, name, batch="b", replicate=replicate)
        sent = Exchanges(LAYER, direct).elements
        sizes = {"elements": direct.elements, "at_least": direct.at_least}
        assert row == sizes | {"sent_elements": sent, "sent_bytes": 2 * sent}
        if name == report["method"]:
            assert report.items() >= row.items()
            assert [cut["elements"] for cut in report["cuts"]] == [cut.elements for cut in direct.cuts]
            assert report["elements"] == sum(cut["pairs"] * cut["elements"] for cut in report["cuts"])
            for tensor, described in report["tensors"].items():
                assert described["cuts"] == [cut.schemes[tensor] for cut in direct.cuts]
                assert (tuple(described["shape"]), described["element_bytes"]) == (LAYER.tensors[tensor], 2)
            indices = [[cut.indices[number] for cut in direct.cuts] for number in range(len(LAYER.steps))]
            assert [described["indices"] for described in report["operators"]] == indices
            assert [described["text"] for described in report["operators"]] == list(map(str, LAYER.steps))
    assert [*report["methods"]] == [name for name in METHODS if replicate or name != "data"]
    assert report["tensors"]["g"]["alike"] == "w"


def test_the_published_layout(run_command: RunCommand) -> None:
    assert run(run_command, "layout product.json --mesh m1:4,m2:2").splitlines() == [
        "a:m2,c:m1 on the mesh m1:4,m2:2, least peak memory",
        "",
        "                          layout  no layout",
        "peak of a rank, elements      75        350",
        "  in bytes                 300 B    1.40 kB",
        "operations of all ranks    1,000      8,000",
        "  without duplicates       1,000      1,000",
        "",
        "not sharded: b",
    ]
    report = run_json(run_command, "layout product.json --mesh m1:4,m2:2")
    layout, none = report.pop("layout"), report.pop("none")
    for described, chosen in ((layout, pd.Layout("a:m2,c:m1")), (none, pd.Layout())):
        expected = PRODUCT.report(chosen, pd.Mesh("m1:4,m2:2"))
        sizes = {"peak_elements": expected.peak, "peak_bytes": 4 * expected.peak}
        assert described == sizes | {"done": expected.done, "unique": expected.unique, "moved": [], "seconds": None}
    assert report == {
        **{"mesh": "m1:4,m2:2", "objective": "memory", "rules": "a:m2,c:m1", "element_bytes": 4},
        **{"fixed": [], "names": {"a": [10], "b": [5], "c": [20]}, "whole": {}},
    }
    assert run_json(run_command, "layout product.json --mesh m1:4,m2:2,m3:1")["rules"] == "a:m2,b:m3,c:m1"
    fixed = run_json(run_command, "layout product.json --mesh m1:4,m2:2 --fixed a,c")
    assert (fixed["rules"], fixed["fixed"], fixed["layout"]) == ("", ["a", "c"], fixed["none"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layout product.json --mesh m1:4,m2:2 --fixed a,c", "^no name is sharded on the mesh m1:4"),
        ("layout product.json --mesh -", "^no name is sharded on the mesh -, least peak memory\n"),
        ("layout product.json --ranks 1", "^recursive over 1 rank: 0 elements a step"),
        ("layout layer.json --ranks 2", "\nleft out: data \\(--json says why\\)\n$"),
    ],
)
def test_what_is_shown_where_there_is_less(text: str, words: str, run_command: RunCommand) -> None:
    assert re.search(words, run(run_command, text))


def test_layout_by_time_is_that_of_the_library(run_command: RunCommand) -> None:
    rates = {"data": 8e9 / 8 / 2, "model": 1e6 / 2}
    text = "layout layer.json --mesh data:4,model:2 --objective time --operations-per-s 1e9 --element-bytes 2"
    by_time = run_json(run_command, f"{text} --bandwidth 8Gbit/s 1MB/s --memory 300kB")
    mesh = pd.Mesh("data:4,model:2")
    direct = pd.lay_out(LAYER, mesh, "time", memory_elements=150_000, operations_per_s=1e9, elements_per_s=rates)
    report = LAYER.report(direct, mesh)
    assert by_time["rules"] == direct.rules
    assert by_time["layout"]["seconds"] == report.seconds(1e9, rates)
    assert by_time["none"]["seconds"] == LAYER.report(pd.Layout(), mesh).seconds(1e9, rates)
    assert {(row["kind"], row["over"]): row["elements"] for row in by_time["layout"]["moved"]} == dict(report.moved)
    assert by_time["layout"]["peak_bytes"] == 2 * report.peak <= 300_000
    shown = run(run_command, f"{text} --bandwidth 1e9")
    assert all(words in shown for words in ("\ntime  ", ", least time\n", "all-reduce over data"))


def test_a_model_with_its_own_loss(run_command: RunCommand) -> None:
    recipe = RECIPE.replace("model = ", "model, loss, batch = Own(), None, {'x': torch.randn(8, 4)}  # ")
    Path("own.py").write_text(recipe.replace("    loss = ", "    # "), encoding="utf-8")
    report = run_json(run_command, "layout own.py --ranks 2")
    tensors, weight = report["tensors"], report["tensors"]["p_inner_weight"]
    assert (weight["shape"], weight["element_bytes"], "x0" in tensors, report["refused"]) == ([4, 4], 4, True, {})
    # A weight, its gradient, its momentum and the updated ones rest alike.
    group = {name: tensor["cuts"] for name, tensor in tensors.items() if tensor["alike"] == weight["alike"]}
    assert group.keys() >= {"p_inner_weight", "s_inner_weight_momentum_buffer", "new_inner_weight"}
    assert all(cuts == weight["cuts"] for cuts in group.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layout layer.json", "give either --mesh, as in data:2,model:2, or --ranks N"),
        ("layout layer.json --ranks 3", "over 3 ranks was asked for, but each cut makes two halves; give a power"),
        ("layout none.json --ranks 2", "none.json does not exist; give the file of Operators"),
        ("layout bad.json --ranks 2", "bad.json: Operators: line 1, column 13 of the operators has the tensor 'u'"),
        ("layout text.json --ranks 2", "text.json is not JSON"),
        ("layout odd.py --ranks 2", "the layer '1' calls aten._fft_r2c.default, which has no description; write one"),
        ("layout failing.py --mesh m:2", "the recipe failed while its step was described on its first batch: "),
        ("layout product.json --mesh m1", "the mesh 'm1' has 'm1', which is not a name and a size; write a mesh as"),
        ("layout product.json --mesh m:2 --objective time", "without --operations-per-s and --bandwidth; give both"),
        ("layout product.json --mesh m:2 --objective time --bandwidth 1e9", "without --operations-per-s; give both"),
        ("layout product.json --mesh m:2 --bandwidth 1e9", "--bandwidth was given, but has no effect on the"),
        (
            "layout product.json --mesh m:2 --objective time --operations-per-s 1 --bandwidth 1,2",
            "--bandwidth has 2 values, but the mesh m:2 has 1 dimensions; give one value, or one for each",
        ),
        ("layout product.json --mesh m:2 --memory much", "'much' is not a size"),
        ("layout product.json --mesh m:2 --memory 3B", "memory of 3 bytes was given, but an element has 4; give"),
        (
            "layout product.json --mesh m1:4,m2:2 --memory 296B",
            "no layout on the mesh m1:4,m2:2 fits 74 elements on a rank: the least is 75, by a:m2,c:m1, 1 too many; "
            "give each rank 75 (a memory of 296 bytes is 74 elements)",
        ),
    ],
)
def test_wrong_calls(text: str, message: str, refused: Callable[..., str]) -> None:
    bad = json.loads(PRODUCT.to_json()) | {"tensors": {"x": [4], "y": [4]}, "text": "y[i] = x[i]+u[i]"}
    Path("bad.json").write_text(json.dumps(bad), encoding="utf-8")
    Path("text.json").write_text("y[i] = x[i]", encoding="utf-8")
    head = RECIPE.replace("nn.ReLU()", "Own()") + "\nclass Own(nn.Module):\n    def forward(self, x):\n        return "
    for name, result in {"odd": "torch.fft.fft(x).abs()", "failing": "x.view(3, 3)"}.items():
        Path(f"{name}.py").write_text(f"{head}{result}\n", encoding="utf-8")
    assert message in refused(*text.split())
