"""Options of a method: keyword arguments in Python, brackets after the name in text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from programs import program_of
from zoo import alike_layers

import pipedream as pd
from pipedream.apps.cli.sweep import _split_values
from pipedream.schedules.registry import options_of
from pipedream.services.checkpoint.folders import read_manifest
from pipedream.services.checkpoint.stores import open_store
from pipedream.workflows import methods, prepare

RunCommand = Callable[..., tuple[int, str, str]]

MINE = """
from pipedream.schedules import Method, build

def mine(
    plan, microbatches=None, *, twice: bool, names: tuple[str, ...] = (), depth: "int | None" = 3, odd: object = 0
):
    if names:
        raise ValueError(f"{names} {depth} {twice}")
    return build("gpipe" if twice else "1f1b", plan, microbatches)

METHODS = (Method(mine), Method(mine, name="other"))
"""


@pytest.mark.parametrize(
    ("name", "named", "options"),
    [
        ("pb_lwp[by=difference]", "pb_lwp[by=difference]", {"by": "difference"}),
        ("PB-LWP[ scale = 2.0, by=difference ]", "pb_lwp[by=difference,scale=2]", {"by": "difference", "scale": 2}),
        ("pb_lwp[by=velocity,scale=1]", "pb_lwp", {}),
        ("paci[backward-rule=recompute]", "paci[backward_rule=recompute]", {"backward_rule": "recompute"}),
        ("pipemare[horizons=3/2.5/0]", "pipemare[horizons=3/2.5/0]", {"horizons": (3, 2.5, 0)}),
        (f"pipemare[horizons=none,decay={exp(-2)}]", "pipemare", {"horizons": None}),
        ("i_timeprest[share=0.1]", "timeprest_interpolated[share=0.1]", {"share": 0.1}),
        ("roundpipe[forwards=3]", "roundpipe[forwards=3]", {"forwards": 3}),
    ],
)
def test_a_name_with_options_is_the_builder_with_them(name: str, named: str, options: dict[str, Any]) -> None:
    plan = pd.schedules.uniform(name, 3)
    built = pd.schedules.build(name, plan)
    assert (built.name, pd.schedules.canonical(name)) == (named, named)
    bare = name.partition("[")[0]
    assert pd.schedules.canonical(bare, **options) == named
    assert pd.schedules.build(bare, plan, **options).name == named
    direct = pd.lower(pd.schedules.method_of(bare).build(plan, **options))
    assert replace(pd.lower(built), name=direct.name) == direct
    assert pd.lower(pd.schedules.build(built.name, built.plan, built.microbatches)) == pd.lower(built)


def test_every_option_of_a_method_can_be_said() -> None:
    texts = {str: "a", float: "2", int: "2", tuple[float, ...] | None: "1/2"}
    count = 0
    for name, method in pd.schedules.METHODS.items():
        for option, parameter in options_of(method).items():
            full = f"{name}[{option}={texts[parameter.annotation]}]"
            assert pd.schedules.canonical(full) == full
            count += 1
    assert count > 20


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pb_lwp", {"rule": "graph"}, "method 'pb_lwp' has no option 'rule'; it has by, scale, backward_rule"),
        ("pb_lwp[scale=2]", {"scale": 3}, "option scale is given in the name and as a keyword argument; give it once"),
        ("pb_lwp", {"scale": "fast"}, "option scale is of type float, found 'fast'; give a number"),
        ("roundpipe", {"forwards": 2.5}, "option forwards is of type int, found '2.5'; give a whole number"),
        ("pb_lwp", {"scale": "2"}, "option scale is of type float, found '2'; give a number"),
        ("pb_lwp", {"by": "a,b"}, "option by = 'a,b' cannot be written as text"),
        ("pb_lwp", {"by": "magic"}, "schedule 'pb_lwp[by=magic]': a prediction is by velocity"),
        ("schedule.csv", {"by": "magic"}, "a file in PyTorch's notation has no options; leave them out"),
        ("paci[rule=graph]", {}, "'paci[rule=graph]': method 'paci' has no option 'rule'; it has backward_rule"),
        ("2bw[by=velocity]", {}, "method 'pipedream_2bw' has no option 'by'; it has none"),
        ("roundpipe[forwards=many]", {}, "option forwards is of type int, found 'many'; give a whole number"),
        ("pb_lwp[scale=]", {}, "is not of the form NAME[OPTION=VALUE,OPTION=VALUE]"),
        ("pipemare[horizons=1/x]", {}, "found '1/x'; give numbers separated by / or none"),
        ("pb_lwp[scale=2,scale=3]", {}, "gives its option scale twice; leave one out"),
        ("pb_lwp[scale=-1]", {}, "give a scale of at least 0, not -1.0"),
        ("pb_lwp[backward_rule=stash]", {}, "its backward rule is graph or recompute, found 'stash'"),
        ("zbh1[a=1]", {}, "schedule 'zbh1[a=1]' is not known; did you mean zb_h1?"),
        *(
            (name, {}, "not of the form NAME[OPTION=VALUE,OPTION=VALUE]; write it as in paci[backward_rule=recompute]")
            for name in (
                "pb_lwp[", "pb_lwp]", "pb_lwp[]", "[by=velocity]", "pb_lwp[by]", "pb_lwp[scale=2,]", "pb_lwp[scale=2]x",
            )
        ),
    ],
)  # fmt: skip
def test_what_is_no_option_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    for make_plan in (pd.Plan.uniform, *([] if options else [partial(pd.schedules.uniform, name)])):
        with pytest.raises(pd.errors.ScheduleError) as refused:
            pd.schedules.build(name, make_plan(3), **options)
        assert message in str(refused.value)


def test_options_of_a_file(tmp_path: Path, run_command: RunCommand) -> None:
    folder = tmp_path / "runs[1]"
    folder.mkdir()
    file = folder / "mine.py"
    file.write_text(MINE)
    assert pd.schedules.canonical(f"{file}:other[depth=none,twice=True]") == f"{file}:other[twice=true,depth=none]"
    for text, name in (("twice=true", "gpipe"), ("twice=false", "1f1b")):
        program = program_of(f"{file}:mine[{text}]", pd.Plan.uniform(2), 4)
        assert replace(program, name=name) == program_of(name, pd.Plan.uniform(2), 4)
        assert program.name == f"{file}:mine[{text}]"
    assert pd.schedules.method_of(f"{file}:mine[depth=5]").name == "mine"
    with pytest.raises(pd.errors.ScheduleError, match=r"failed with ValueError: \('a', 'b'\) 7 True \("):
        pd.schedules.build(f"{file}:mine[twice=true,names=a/b,depth=7]", pd.Plan.uniform(2))
    for text, message in (
        ("twice=perhaps", "found 'perhaps'; give true or false"),
        ("odd=1", "option odd is of type object, .* give it a default and leave it out: this type has no text form"),
        ("names=", "is not of the form"),
    ):
        with pytest.raises(pd.errors.ScheduleError, match=message):
            pd.schedules.build(f"{file}:mine[{text}]", pd.Plan.uniform(2))
    status, out, _ = run_command("show", f"{file}:mine[twice=true]", "--verify")
    assert (status, f"Proof of {file}:mine[twice=true], plan" in out) == (0, True)


def test_phases() -> None:
    text = "1f1b/4:200,pb_lwp[by=difference,scale=2]+spike:3e,x.py:one[a=1/2,b=c]/2:500,paci[backward_rule=recompute]/4"
    phases = prepare.read_run_phases(None, None, text)
    assert [(phase.name, phase.microbatches, phase.until, phase.until_epoch) for phase in phases] == [
        ("1f1b", 4, 200, None),
        ("pb_lwp[by=difference,scale=2]", None, None, 3),
        ("x.py:one[a=1/2,b=c]", 2, 500, None),
        ("paci[backward_rule=recompute]", 4, None, None),
    ]
    assert ",".join(map(str, phases)) == text
    for wrong in ("1f1b:3,pb_lwp[by=difference", "1f1b:3,pb_lwp[by=a]b", "1f1b:3,pb_lwp[a[b]]"):
        with pytest.raises(pd.errors.ScheduleError, match=r"METHOD may have options"):
            prepare.read_run_phases(None, None, wrong)
    names = ["pipedream", "pb_lwp[by=difference,scale=2]", "gpipe"]
    assert _split_values([",".join(names[:2]), names[2]]) == names


def test_a_plan_knows_its_method_by_its_other_names() -> None:
    plan = replace(pd.Plan.uniform(3), schedule="paci[backward_rule=recompute]", microbatches=8)
    assert methods.resolve_method(plan, None) == methods.resolve_method(plan, "PACI[backward-rule = recompute]")
    assert methods.resolve_method(plan, "paci[backward_rule=recompute]") == ("paci[backward_rule=recompute]", 8)
    assert methods.resolve_method(plan, "paci") == ("paci", None)
    assert methods.resolve_method(replace(plan, schedule="pipedream_2bw"), "2bw") == ("pipedream_2bw", 8)


def test_the_commands(run_command: RunCommand, tmp_path: Path) -> None:
    saved, out = alike_layers(8).save(tmp_path / "profile.json"), tmp_path / "plan.json"
    name = "paci[backward_rule=recompute]"
    assert run_command("plan", saved, "--workers", 2, "--microbatches", 4, "--schedule", name, "-o", out)[0] == 0
    plan = pd.Plan.load(out)
    assert (plan.schedule, plan.microbatches) == (name, 4)
    status, text, _ = run_command("plan", "--check", out)
    assert (status, f"valid: {name} with 4 microbatches" in text) == (0, True)
    assert run_command("simulate", out)[0] == 0
    again = json.loads(run_command("simulate", out, "--schedule", "paci[backward_rule = recompute]", "--json")[1])
    assert again == json.loads(run_command("simulate", out, "--json")[1])
    assert run_command("plan", saved, "--workers", 2, "--schedule", "roundpipe[forwards=2]", "-o", out)[0] == 0
    assert pd.Plan.load(out).schedule == "roundpipe[forwards=2]"
    status, _, error = run_command("show", "paci[rule=graph]")
    assert (status, "has no option 'rule'" in error) == (2, True)
    # Of two stages, and no other number: for a plan that is there.
    assert run_command("plan", saved, "--workers", 2, "--schedule", "pipemare", "--straight", "-o", out)[0] == 0
    assert run_command("plan", "--check", out, "--schedule", "pipemare[horizons=1/0]")[0] == 0


@pytest.mark.parametrize("name", ["pb_lwp", "pb_lwp_sc", "paci", "pb_lwp[by=difference]"])
def test_a_refusal_names_what_was_asked_and_advises_an_option(name: str) -> None:
    again = replace(pd.Plan.uniform(2), stages=tuple(replace(s, recompute=True) for s in pd.Plan.uniform(2).stages))
    bare, _, _ = name.partition("[")
    with pytest.raises(pd.errors.ScheduleError) as raised:
        pd.schedules.build(name, again)
    assert str(raised.value).startswith(f"schedule '{bare}': ")
    assert str(raised.value).endswith("or give the method the option backward_rule=recompute")
    pd.schedules.build(name, again, backward_rule="recompute")


def test_a_pipeline_and_its_checkpoint(tmp_path: Path) -> None:
    animal = zoo.make("mlp")
    plan = zoo.plan_of(animal, 3)
    how: dict[str, Any] = {"loss": animal.loss, "optimizer": partial(torch.optim.SGD, lr=0.05)}
    with pd.Pipeline(animal.model, plan, schedule="pb_lwp[by=difference]", **how) as pipeline:
        assert pipeline.program == pd.lower(pd.schedules.build("pb_lwp", plan, by="difference"))
        for done in pipeline.train(animal.batches):
            if done.number == 2:
                saved = pipeline.save(tmp_path)
    schedule = read_manifest(open_store(saved)).schedule
    assert schedule == "pb_lwp[by=difference]"
    with pd.Pipeline(animal.model, plan, phases=[pd.Phase(schedule)], **how) as again:
        again.load(tmp_path)
        assert again.program == pipeline.program
