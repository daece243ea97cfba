"""The command `pipedream show`, and what it shares with `simulate`: what m is, and how long a run is."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from commands import Answer, Refused, Run

import pipedream as pd

NO_SPLIT = "does not split a minibatch"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("simulate --uniform 4 --schedule one_step_ef --microbatches 2", "needs at least 3"),
        ("show pipedream --microbatches 2", f"{NO_SPLIT}.*--minibatches 2"),
        ("show pipedream --microbatches 2 --minibatches 4", f"{NO_SPLIT}.*--minibatches 2"),
        ("simulate --uniform 4 --schedule chimera --chunks 3", "schedule 'chimera' with 3 chunks per worker"),
        ("simulate plan.json --chunks 2", "with --chunks 2"),
        *((f"simulate plan.json --{name}-s 2", f"with --{name}-s 2.0, but a plan") for name in ("forward", "transfer")),
        ("show 1f1b --stages 100000", "(?s)'--stages'.*256"),
        ("simulate --uniform 2 --slow 1", "--slow '1' is not known; write RANK=FACTOR"),
        ("simulate --uniform 2 --slow 4=2", "the ranks are 0 to 1"),
    ],
)
def test_what_makes_no_sense_is_refused(command: str, message: str, files: Path, refused: Refused) -> None:
    assert re.search(message, refused(*command.split()))


def test_the_proof_has_m_and_both_delays(run_command: Run) -> None:
    grid, proof, claims = run_command("show", "paci", "--stages", 4, "--microbatches", 2, "--verify")[1].split("\n\n")
    assert grid.splitlines()[-1] == "a run of 4 minibatches of m = 2 microbatches"
    assert "Proof of paci, plan 1-1-1-1, m = 2: each op once" in proof
    rows = [line.split() for line in proof.splitlines()[2:]]
    assert rows[0][-2:] == ["staleness", "mean"]
    assert [row[-2:] for row in rows[1:]] == [["2", "1.5"], ["1", "1"], ["1", "0.5"], ["0", "0"]]
    assert claims.endswith("in flight, staleness, versions; the simulation agrees\n")
    assert "mean" not in run_command("show", "pipedream", "--verify")[1]
    assert run_command("show", "1f1b", "--microbatches", 4)[1].splitlines()[-1].startswith("rank 3"), "what was asked"
    assert "a run of 1 minibatch of m = 8 microbatches" in run_command("show", "1f1b")[1]


@pytest.mark.parametrize(("name", "label"), [("1f1b", "v0"), ("chimera", "s3")])
def test_it_draws_the_run_that_simulate_predicts(name: str, label: str, answer: Answer, tmp_path: Path) -> None:
    """Its boxes have the stage where a worker has several, or the version."""
    drawn = answer("show", name, "--microbatches", 8, "--svg", tmp_path / "drawn.svg")
    predicted = answer("simulate", "--uniform", 4, "--schedule", name, "--microbatches", 8)
    assert max(op["end_s"] for op in drawn["ops"]) == predicted["makespan_s"]
    assert f">{label}<" in (tmp_path / "drawn.svg").read_text()


def test_the_program_has_all_that_ranks_wait_for(run_command: Run) -> None:
    shown = run_command("show", "roundpipe[delay=1]", "--stages", 3, "--microbatches", 2, "--program")[1]
    for words in (
        "*2:0   stage 2, repeating the forward of microbatch 0",
        "^F2:0  stage 2, waiting for the weights of microbatch 0",
        "^B2:0  stage 2, waiting for the buffers before microbatch 0",
        "^U5:1  stage 5, waiting for the gradients of update 1",
    ):
        assert words in shown
    told = json.loads(run_command("show", "1f1b", "--stages", 2, "--microbatches", 2, "--program", "--json")[1])
    assert told["program"]["ranks"][1]["period"] == "<2:0 <0:0 1F0 1B0 >1:0 <2:1 <0:1 1F1 1B1 >1:1 1U1"


def test_the_length_of_a_run() -> None:
    plan, run_of = pd.Plan.uniform(4), pd.schedules.run_of
    assert run_of("1f1b", plan, usual=8).microbatches == 8
    assert run_of("1f1b", plan, 6, 2).microbatches == 12
    # It does not take 8, and was not asked to: its own number.
    interleaved = pd.schedules.uniform("interleaved_1f1b", 3)
    assert run_of("interleaved_1f1b", interleaved, usual=8).schedule.microbatches == 12
    late = run_of("pipelined_backprop", pd.Plan.uniform(8), usual=8)
    assert (late.minibatches, str(late)) == (16, "a run of 16 minibatches")
    built = pd.schedules.build("paci", plan, 5)
    assert run_of(built, plan, minibatches=2).microbatches == 10
    for method, counts, words in (
        (built, (4,), "built for 5 microbatches per minibatch, but 4 were asked for; leave the number out"),
        ("pipedream", (12,), r"does not split a minibatch.* or minibatches=12 in Python"),
        ("1f1b", (None, 0), "at least 1 minibatch, found 0"),
        ("1f1b", (10**8,), "100,000,000 microbatches was asked for; at most 1,000,000"),
    ):
        with pytest.raises(pd.PipelineError, match=words):
            run_of(method, plan, *counts)


WRONG = """
from pipedream.schedules import Claims, Method, build

def mine(plan, microbatches=None):
    gpipe = build("gpipe", plan, microbatches)
    return replace(gpipe, claims=replace(gpipe.claims, CLAIM))

from dataclasses import replace
METHODS = (Method(mine),)
"""


@pytest.mark.parametrize(
    ("claim", "difference"),
    [
        ("staleness=lambda p, m, s: 1", "staleness of stage 0: claimed 1, simulated 0"),
        ("in_flight=lambda p, m, s: p - s", "in flight of worker 1: claimed 2, simulated 4"),
        ("bubble=lambda p, m: 0.5", "bubble of one minibatch: claimed 0.5, simulated 0.333333"),
        ("makespan_s=lambda p, m, n, f, i, w: f", "makespan in seconds of one minibatch: claimed 1, simulated 18"),
    ],
)
def test_a_wrong_claim_is_found(run_command: Run, tmp_path: Path, claim: str, difference: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(WRONG.replace("CLAIM", claim))
    shown = ("show", file, "--stages", 3, "--microbatches", 4)
    for options in (("--verify",), ("--verify", "--json")):
        status, out, _ = run_command(*shown, *options)
        assert (status, difference in out) == (1, True)
    assert run_command(*shown)[0] == 0


def test_a_claim_that_fails_is_an_error(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "mine.py").write_text(WRONG.replace("CLAIM", "staleness=lambda p, m, s: 1 // 0"))
    assert "a claim failed with ZeroDivisionError" in refused("show", tmp_path / "mine.py", "--verify")


def test_claims_that_are_not_compared_are_named(run_command: Run, answer: Answer, tmp_path: Path) -> None:
    status, out, _ = run_command("show", "zbv", "--stages", 8, "--microbatches", 8, "--verify")
    assert status == 0
    for claim in ("in flight", "bubble", "makespan in seconds"):
        assert f"not compared: {claim}: it is claimed from m = 16 on, and m is 8" in out
    (tmp_path / "mine.py").write_text(
        WRONG.replace("gpipe", "pipedream").replace("CLAIM", "bubble=lambda p, m: 0.0, in_flight=None")
    )
    shown = ("show", tmp_path / "mine.py", "--stages", 3, "--verify")
    status, out, _ = run_command(*shown)
    why = "not compared: bubble: it is compared over one minibatch, and this method does not flush"
    assert (status, out.rstrip().splitlines()[-1]) == (0, why)
    (omitted,) = answer(*shown)["claims"]["omitted"]
    assert omitted.startswith("bubble:")
    assert "not compared" not in run_command("show", "zbv", "--stages", 4, "--microbatches", 8, "--verify")[1]


def test_a_plan_is_drawn_with_its_own_seconds(run_command: Run, tmp_path: Path, refused: Refused) -> None:
    plan = replace(pd.Plan.uniform(2, 1.0, 3.0), schedule="gpipe", microbatches=3)
    path, picture = plan.save(tmp_path / "plan.json"), tmp_path / "plan.svg"
    drawn = run_command("show", path)[1]
    assert [" ".join(line.split("|")[1].split()[:5]) for line in drawn.splitlines()[1:3]] == [
        "F0 F1 F2 . .", ". F0 F1 F2 B0"
    ]  # fmt: skip
    assert "B0  ==  ==" in drawn
    status, out, _ = run_command("show", path, "--schedule", "1f1b", "--microbatches", 2, "--svg", picture, "--verify")
    assert (status, "Proof of 1f1b" in out, "the simulation agrees" in out) == (0, True, True)
    assert "0B1: backward, microbatch 1, 3.00 s" in picture.read_text()
    for option in ("--stages", "--chunks", "--forward-s"):
        assert "a plan has its own stages" in refused("show", path, option, 2)
    assert "give one of them" in refused("show", "gpipe", "--schedule", "1f1b")
