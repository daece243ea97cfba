"""recompute: which stages repeat their forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from pipedream.core.plan.choice import WordChoice
from pipedream.core.plan.stage import Stage

ALWAYS, AUTOMATIC, NEVER = "always", "auto", "never"


class Recomputation(WordChoice):
    """Which stages a search lets repeat their forward. In a plan its stages say it, and this is 'never'."""

    option = "recompute"
    help = (
        "Which stages keep only their input and repeat the forward: none (never), those that would not fit the memory "
        "otherwise (auto), or all (always)."
    )
    is_searched = True
    is_stored = False
    texts = NEVER, AUTOMATIC, ALWAYS

    @classmethod
    def read(cls, text: Any) -> Self:
        return super().read(ALWAYS if text is True else text)

    @property
    def recomputing(self) -> tuple[bool, ...]:
        return {NEVER: (False,), AUTOMATIC: (False, True), ALWAYS: (True,)}[self]

    @property
    def overrides(self) -> tuple[str, ...]:
        return ("activations",) if self == ALWAYS else ()  # only inputs would be left to move

    def change_stage(self, stage: Stage, before: Any) -> Stage:
        return replace(stage, recompute=True, offload=False) if self == ALWAYS else stage

    def suggest_smaller(self, choices: Any, *, on_gpus: bool) -> str:
        return AUTOMATIC if self == NEVER else ""


CHOICES = (Recomputation(NEVER),)
