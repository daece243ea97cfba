"""Plans know what encoded messages send and cost, and offer approximations only where they save time."""

from dataclasses import replace
from typing import Any

import pytest

import pipedream as pd
from pipedream.simulator.costs import costs
from tests.planner.planned import compare

PROFILE = pd.Profile.of_chain((pd.LayerProfile(0.1, 0.2, 1_000_000, 40_000_000),) * 8, batch=8)
SLOW, FAST = pd.Cluster.flat(2, 1e6), pd.Cluster.flat(2, 1e9)
HOW = {"schedule": "1f1b", "microbatches": 8, "shape": "straight"}
PROGRAM = pd.lower(pd.schedules.build("1f1b", pd.Plan.uniform(2), 8))
CHANNELS = {channel.carries.name: channel for channel in PROGRAM.channels}


@pytest.mark.parametrize(
    ("messages", "shares"),
    [("full", (1, 1)), ("bfloat16", (1 / 2, 1 / 2)), ("int8,bfloat16", (8.5 / 32, 1 / 2)), ("int4", (4.5 / 32,) * 2)],
)
def test_a_plan_counts_the_bytes_of_each_direction(messages: str, shares: tuple[float, float]) -> None:
    plan = pd.plan(PROFILE, SLOW, messages=messages, **HOW)
    assert str(plan.choices.messages) == messages
    seconds = costs(plan, split=8)
    sent = {name: seconds.channel_bytes(channel) for name, channel in CHANNELS.items()}
    assert sent == {"ACTIVATION": 125_000 * shares[0], "GRADIENT": 125_000 * shares[1], "INPUT": 0}
    assert plan.costs.transfers_s == pytest.approx([sum(shares) / 2])
    loaded = pd.Plan.from_json(plan.to_json())
    assert (loaded, loaded.costs) == (plan, plan.costs)


def test_numbers_of_two_bytes_have_less_to_lose() -> None:
    plan = pd.plan(replace(PROFILE, dtype="bfloat16"), SLOW, messages="int8,bfloat16", **HOW)
    assert plan.costs.terms[0].message_shares == (8.5 / 16, 1.0)


def test_encoding_costs_time_at_both_ends() -> None:
    runtime = replace(PROFILE.runtime, message_s_per_byte=2e-9, encodings_s_per_byte={"int8": 5e-9})
    profile = replace(PROFILE, runtime=runtime)
    plain, coded = (costs(pd.plan(profile, FAST, messages=m, **HOW), split=8) for m in ("full", "int8"))
    assert plain.end_s(CHANNELS["ACTIVATION"]) == pytest.approx(125_000 * 2e-9)
    assert coded.end_s(CHANNELS["ACTIVATION"]) == pytest.approx(125_000 * (2e-9 * 8.5 / 32 + 5e-9))
    plan = pd.plan(profile, FAST, messages="int8", **HOW)
    assert plan.runtime == runtime, "the costs of the encoding are added where they are read"


def test_an_approximation_is_offered_with_an_exact_answer() -> None:
    compared = compare(PROFILE, SLOW, allow_approximate=True, **HOW)
    assert not compared.exact.plan.choices.words
    assert compared.plan.choices.words
    assert compared.verdict.startswith("use ")
    assert "(approximate: " in compared.verdict
    assert compared.verdict.endswith(f"; without approximation {compared.exact.verdict}")
    assert compared.candidates[0].period_s < 0.98 * compared.exact.candidates[0].period_s
    copies = compare(PROFILE, SLOW, allow_approximate=True, **HOW | {"shape": "data-parallel"})
    assert "with sums=sparse:30,0.02 (approximate)" in copies.verdict, "what sends least"


@pytest.mark.parametrize(
    ("cluster", "options", "is_named"),
    [(SLOW, {}, True), (FAST, {}, False), (SLOW, {"messages": "int8"}, False), (pd.Cluster.flat(1, 1e6), {}, False)],
)
def test_averages_are_named_unasked_where_they_save_much(cluster: pd.Cluster, options: Any, is_named: bool) -> None:
    compared = compare(PROFILE, cluster, **options)
    words = "; if replicas may differ between averages (approximate), sums=sparse:30,0.02 on 2 workers takes 1.28 s"
    assert compared.verdict.endswith(words) == is_named
    assert ("averages" in compared.verdict) == is_named


def test_no_approximation_where_the_link_is_fast() -> None:
    encodings = dict.fromkeys(("bfloat16", "int8", "int4"), 1e-9)
    profile = replace(PROFILE, runtime=replace(PROFILE.runtime, encodings_s_per_byte=encodings))
    assert not pd.plan(profile, FAST, allow_approximate=True, **HOW).choices.messages


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"messages": "int9"}, "messages='int9' was asked for; the encodings are full, bfloat16"),
        ({"messages": "int8", "allow_approximate": True}, "allow_approximate=True was given with messages='int8', but"),
        ({"strategy": "2bw", "allow_approximate": True}, "allow_approximate=True was given with strategy='2bw'"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises(pd.PipelineError, match=words):
        pd.plan(PROFILE, SLOW, **options)
