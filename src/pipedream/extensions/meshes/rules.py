"""Layouts of tensors, as the core asks for them."""

from dataclasses import replace

from pipedream.core.plan.ranks import TensorLayout
from pipedream.extensions.meshes.layout import Layout


def make_layout(layout: TensorLayout | None, rules: str | None, shard_weights: str | None) -> TensorLayout:
    """Returns a layout with other rules, where they are given; by default one without any."""
    base = layout if isinstance(layout, Layout) else Layout()
    new_rules = base.rules if rules is None else rules
    return replace(base, rules=new_rules, shard_weights=shard_weights or base.shard_weights)
