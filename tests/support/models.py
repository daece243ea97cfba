"""All models that the tests split, by name."""

from __future__ import annotations

from hf_models import HF
from own_models import OWN, Case

__all__ = ["CASES", "Case"]

CASES: dict[str, Case] = OWN | HF
