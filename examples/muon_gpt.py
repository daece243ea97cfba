"""The small GPT of char_gpt.py with Muon for the matrices of its blocks, AdamW for the rest, for 2BW's stale gradients.

Run it: pipedream train examples/muon_gpt.py --workers 2 --schedule pipedream_2bw --compensation error_feedback
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from char_gpt import recipe as char_gpt
from torch import nn

import pipedream


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for matrices (Jordan et al., 2024), AdamW for embeddings, the output layer and vectors, as one optimizer.

    Muon's updates have the size of AdamW's (Liu et al., 2025), so that one learning rate serves both.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], lr: float) -> None:
        matrices = [p for name, p in named if p.ndim == 2 and (".self_attn." in name or ".linear" in name)]
        chosen = set(map(id, matrices))
        others = [p for _, p in named if id(p) not in chosen]
        muon = [torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")] if matrices else []
        self.parts = [*muon, *([torch.optim.AdamW(others, lr=lr)] if others else [])]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:
        """Makes an update; schedulers and checkpoints may have replaced groups and state since the last."""
        for at, part in enumerate(self.parts):
            part.param_groups, part.state = [self.param_groups[at]], self.state
            part.step()


def recipe(seed: int = 0) -> pipedream.Recipe:
    return replace(char_gpt(seed), optimizer=partial(MuonAndAdamW, lr=4e-3))


if __name__ == "__main__":
    pipedream.run(recipe)
