"""What a plan trades: whose choice counts, and where its texts are kept."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import pipedream as pd
from pipedream.core.plan.choices import Choices

SOURCES = ("command", "checkpoint", "plan", "recipe")


@pytest.mark.parametrize("first", range(len(SOURCES)))
def test_the_first_that_chooses_counts(first: int) -> None:
    texts = dict(zip(SOURCES, ("every:2", "every:3", "every:4", "every:5"), strict=True))
    sources = {name: Choices(sums=texts[name]) if at >= first else Choices() for at, name in enumerate(SOURCES)}
    assert str(Choices.resolve(**sources).sums) == texts[SOURCES[first]]


def test_defaults_count_where_they_are_written() -> None:
    in_plan = Choices(messages="int8", activations="host", optimizer_state="host")
    assert Choices.resolve(command=Choices(), plan=in_plan, recipe={"messages": "int4"}) == in_plan
    command = SimpleNamespace(messages="full", activations="none", optimizer_state="device", sums=None)
    assert Choices.resolve(command=command, plan=in_plan) == Choices()


def test_stages_that_recompute_have_no_activations_to_move() -> None:
    resolved = Choices.resolve(command={"recompute": True}, plan=Choices(activations="host"))
    assert resolved.words == {"recompute": "always"}
    plan = pd.Plan.uniform(2).choosing(activations="host")
    assert [stage.offload for stage in plan.stages] == [True, True]
    again = plan.choosing(recompute="always")
    assert not again.choices.words
    assert [(stage.offload, stage.recompute) for stage in again.stages] == [(False, True)] * 2


def test_files_have_the_choices_beside_the_stages() -> None:
    plan = pd.Plan.uniform(2, replicas=(2, 1)).choosing(sums="diloco:8", messages="int8,full", optimizer_state="host")
    data = json.loads(plan.to_json())
    assert (data["sums"], data["messages"]["activations"], data["activations"]) == ("diloco:8", "int8", "")
    assert data["optimizer_state"] == "host"
    assert "choices" not in data
    assert pd.Plan.from_json(plan.to_json()) == plan
    for name in ("sums", "messages", "activations", "optimizer_state"):
        del data[name]
    assert pd.Plan.from_json(json.dumps(data)) == replace(plan, choices=Choices())
    with pytest.raises(pd.PipelineError, match=r"Plan\.sums: sums='fp8' is not known"):
        pd.Plan.from_json(json.dumps(data | {"sums": "fp8"}))
