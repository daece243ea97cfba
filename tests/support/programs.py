"""Programs of methods, and programs changed on purpose."""

from dataclasses import replace
from typing import Any

import pipedream as pd


def program_of(method: str, plan: pd.Plan, microbatches: int | None = None) -> pd.Program:
    return pd.lower(pd.schedules.build(method, plan, microbatches))


def uniform_program(method: str, *replicas: int, microbatches: int | None = None, depth: str = "noam") -> pd.Program:
    return program_of(method, pd.Plan.uniform(len(replicas), replicas=replicas).with_depth(depth), microbatches)


def with_rank(program: pd.Program, rank: int, **parts: Any) -> pd.Program:
    ranks = list(program.ranks)
    ranks[rank] = replace(ranks[rank], **parts)
    return replace(program, ranks=tuple(ranks))


def edited(program: pd.Program, rank: int, *changes: tuple[str, str]) -> pd.Program:
    """Returns the program with pieces of a rank's text replaced, one after the other."""
    rows = (*program.ranks, program.ranks[rank])  # what two ranks have is the rank's own
    items = {str(item): item for row in rows for item in (*row.warmup, *row.period)}
    parts = (getattr(program.ranks[rank], name) for name in ("warmup", "period"))
    text = " | ".join(" ".join(map(str, part)) for part in parts)
    for old, new in changes:
        assert f" {old} " in f" {text} ", f"{old} in {text}"
        text = " ".join(f" {text} ".replace(f" {old} ", f" {new} ", 1).split())
    warmup, period = (tuple(items[word] for word in part.split()) for part in f" {text} ".split(" | "))
    return with_rank(program, rank, warmup=warmup, period=period)
