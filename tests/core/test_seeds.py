"""Seeds of random numbers: one for each run, layer and microbatch."""

from __future__ import annotations

from itertools import product

from pipedream.core.seeds import layer_seed


def test_runs_layers_and_microbatches_draw_other_numbers() -> None:
    seeds = [layer_seed(*each) for each in product((0, 1), range(5), ("", "a", "a@2", "b"))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
