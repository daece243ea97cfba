"""What is retired is refused, with the words of one table; nothing else is."""

from pathlib import Path

import pytest
from commands import Refused, Run

import pipedream as pd
from pipedream.apps.cli import retired

GRAPH = """\
node1 -- Input -- forward_compute_time=9.0, backward_compute_time=0.0, activation_size=100.0, parameter_size=0.0
node2 -- Linear -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=50.0, parameter_size=8.0
\tnode1 -- node2
"""
CONVERT = "in the sources, python benchmarks/paper_tables/graph_txt.py FILE -o PROFILE converts it"


@pytest.mark.parametrize(
    ("command", "start", "instead"),
    [
        ("plan profile.json --workers 2 --cost-model classic", "plan --cost-model", "benchmarks/paper_tables"),
        ("plan profile.json --workers 2 -oout.txt", "plan --output=out.txt", "name a JSON file"),
        ("plan net --workers 2", "reading a graph.txt (net)", CONVERT),
        ("check plan.json", "check", "pipedream plan --check PLAN does it"),
        ("partition recipe.py --ranks 4", "partition", "pipedream layout --ranks N"),
        ("plan net.txt --check plan.json", "reading a graph.txt (net.txt)", CONVERT),
    ],
)
def test_it_says_what_to_do_instead(command: str, start: str, instead: str, files: Path, refused: Refused) -> None:
    for name in ("net", "net.txt"):
        Path(name).write_text(GRAPH)
    Path("recipe.py").write_text("def recipe(seed): ...\n")
    message = refused(*command.split())
    assert message.startswith(f"pipedream: {start} is retired; ")
    assert instead in message
    assert len(message.splitlines()) == 1
    assert len(message.split()) <= 25
    assert not Path("out.txt").exists()


def test_a_profile_may_have_any_name(files: Path, run_command: Run, refused: Refused) -> None:
    Path("profile.json").rename("profile.txt")
    assert run_command("plan", "profile.txt", "--workers", "2", "-o", "plan.txt.json")[0] == 0
    assert pd.Plan.load("plan.txt.json").workers == 2
    Path("none.txt").touch()
    assert "none.txt is not JSON" in refused("plan", "none.txt", "--workers", "2")
    assert "No such option: --batch" in refused("simulate", "plan.json", "--batch", "2"), "it was none of simulate"


def test_whole_commands_retire(
    files: Path, monkeypatch: pytest.MonkeyPatch, run_command: Run, refused: Refused
) -> None:
    rows = {"emulate": "run it", "* --minibatches": "count", "* --memory=1*": "more"}
    monkeypatch.setattr(retired, "RETIRED", rows)
    assert refused("emulate", "plan.json") == refused("emulate", "-h") == "pipedream: emulate is retired; run it\n"
    assert refused("simulate", "plan.json", "--minibatches", 2).endswith("simulate --minibatches is retired; count\n")
    limited = ("plan", "profile.json", "--workers", "2", "--memory")
    assert "plan --memory=1GB is retired" in refused(*limited, "1GB")
    assert run_command(*limited, "2GB")[0] == 0
