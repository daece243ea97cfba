"""What a check finds: numbers, each with the bound that it must keep.

A check yields each finding as soon as it is known, so that an error or the time limit loses only the later ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Finding:
    """One number of a check.

    Attributes:
        name: ends in its unit, unless it is a count or a ratio.
        sign: how the number must compare with the bound: '<=', '>=' or '=='; '' if there is no bound.
        note: what else is worth reading.
    """

    name: str
    number: float
    sign: str = ""
    bound: float = math.nan
    note: str = ""

    @property
    def ok(self) -> bool:
        if self.sign == "<=":
            return self.number <= self.bound
        if self.sign == ">=":
            return self.number >= self.bound
        return self.number == self.bound if self.sign else True

    @property
    def bound_text(self) -> str:
        return f"{self.sign} {self.bound:.12g}" if self.sign else ""


class NeedsCard(RuntimeError):
    """The rest of a check means nothing on a CPU."""


def need_card(device: torch.device) -> None:
    if device.type != "cuda":
        raise NeedsCard("needs a CUDA device")
