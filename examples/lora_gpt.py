"""The small GPT of char_gpt.py, frozen, with trained adapters of its matrices (LoRA; Hu et al., ICLR 2022).

Run it: pipedream train examples/lora_gpt.py --workers 2 --schedule "roundpipe[delay=1]"
RoundPipe keeps frozen weights in the memory of the machine, too, but no gradients and no optimizer state for them.
"""

from dataclasses import replace

import torch
from char_gpt import recipe as char_gpt
from torch import nn
from torch.nn.utils import parametrize

import pipedream

RANK = 4


class Adapter(nn.Module):
    """W + B A: the product of two thin matrices, at first zero, is added to a weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(RANK, weight.shape[1]) / weight.shape[1] ** 0.5)
        self.b = nn.Parameter(torch.zeros(weight.shape[0], RANK))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a


def adapt(model: nn.Module) -> nn.Module:
    """Freezes a model, and gives adapters to the matrices of its linear layers and of attention."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.ndim == 2 and isinstance(module, nn.Linear | nn.MultiheadAttention):
                parametrize.register_parametrization(module, name, Adapter(weight))
    return model


def recipe(seed: int = 0) -> pipedream.Recipe:
    """Adapts random weights, to be small, which learn less than all do; give those of a trained model to `adapt`."""
    whole = char_gpt(seed)
    return replace(whole, model=adapt(whole.model), target=("loss", 2.5))


if __name__ == "__main__":
    pipedream.run(recipe)
