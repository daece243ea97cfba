"""The options of training: listed and documented once, given as keyword arguments."""

import dataclasses
import inspect
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pipedream as pd
from pipedream.apps.training.job import Job
from pipedream.apps.training.options import TrainingOptions
from pipedream.core.flags import flag_of
from pipedream.options import MethodOptions, ModelOptions, PipelineOptions

KINDS = [ModelOptions, MethodOptions, PipelineOptions, TrainingOptions, pd.Recipe]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_option_is_documented_where_it_is_declared(kind: Any) -> None:
    lists = re.findall(r"^    ([a-z_, ]+):", inspect.getdoc(kind).partition("Attributes:")[2], re.MULTILINE)
    documented = {name for names in lists for name in names.split(", ")}
    helped = {field.name for field in dataclasses.fields(kind) if (flag := flag_of(field)) and flag.help}
    assert documented <= set(kind.__annotations__) <= documented | helped


def test_a_pipeline_shows_its_options() -> None:
    names = list(inspect.signature(pd.Pipeline).parameters)
    assert names[:2] == ["model", "plan"]
    assert set(names[2:]) == {field.name for field in dataclasses.fields(PipelineOptions)}
    of_run = [field.name for field in dataclasses.fields(TrainingOptions)]
    assert set(inspect.signature(pd.run).parameters) == {"recipe", *of_run}


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(TypeError, match=r"run\(\) got an unexpected keyword argument 'epoch'; did you mean 'epochs'\?"):
        pd.run(lambda: None, epoch=1)  # type: ignore[call-arg, arg-type, return-value]
    with pytest.raises(TypeError, match=r"Pipeline\(\) got an .* 'clip_grad_nrom'; did you mean 'clip_grad_norm'\?"):
        pd.Pipeline(None, None, clip_grad_nrom=1)  # type: ignore[call-arg]
    intervals = ({"checkpoint_every": every} for every in (-1, "seldom", "1.5"))
    for wrong in ({"epochs": 0}, {"keep": 0}, {"minibatches": 1.5}, *intervals, {"stuck_after_s": -1.0}):
        (name,) = wrong
        with pytest.raises(pd.PipelineError, match=f"{name}=.* was asked for; give"):
            TrainingOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(pd.PipelineError, match="scheduler is 3, which cannot be called; metrics is not a dict"):
        PipelineOptions(optimizer=torch.optim.SGD, scheduler=3, metrics=[])  # type: ignore[arg-type]


@pytest.mark.parametrize("verbose", [False, True])
def test_a_run_prints_slow_layers_or_all(verbose: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    widths, data = [8, 8, 512, 512, 8, 512, 512, 8], [(torch.zeros(4, 8), torch.zeros(4, 8))]
    model = torch.nn.Sequential(*map(torch.nn.Linear, widths, widths[1:]))
    recipe = pd.Recipe(model, torch.nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), data)
    pd.run(lambda: recipe, workers=1, out=tmp_path, verbose=verbose)
    printed = capsys.readouterr().out.partition("Profile of Sequential")[2].partition("Plan ")[0]
    rows = [line.split()[0] for line in printed.partition("total")[0].splitlines()[2:]]
    assert (len(rows), rows == sorted(rows), {"2", "5"} <= {*rows}) == (7 if verbose else 5, True, True)
    assert ("the slowest 5 of 7 layers" in printed, "total" in printed) == (not verbose, True)


@pytest.mark.parametrize(("option", "of_recipe", "expected"), [(False, "eager", "eager"), (True, "eager", True)])
def test_a_run_compiles_as_its_recipe_unless_asked(option: bool, of_recipe: str, expected: bool | str) -> None:
    unused: dict[str, Any] = {field.name: None for field in dataclasses.fields(Job)}
    recipe = SimpleNamespace(compile=of_recipe)
    assert Job(**unused | {"options": TrainingOptions(compile=option), "recipe": recipe}).compile == expected
