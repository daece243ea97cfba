"""Models in a line: parts by name, and a forward that uses them; and what is left as it was."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Built(nn.Module):
    """Has these parts (modules, parameters or anything else), and calls `function` on itself and its inputs."""

    def __init__(self, function: Callable[..., Any] | None, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.function(self, *inputs, **options)


def in_loop(self: Any, x: Tensor) -> Tensor:
    """Runs a cell over the steps of a sequence: its weights are read several times in one forward."""
    state: Any = None
    for step in x.unbind(1):
        state = self.cell(step, state)
    return state[0] if isinstance(state, tuple) else state


class Watched(nn.Module):
    """Counts its results that are in memory at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Any] = []
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        output = torch.exp(x)  # keeps its result
        self.alive.append(weakref.ref(output.untyped_storage()))
        self.most = max(self.most, sum(ref() is not None for ref in self.alive))
        return output * 2.0


@contextmanager
def unchanged(*modules: nn.Module, also: tuple[Tensor, ...] = (), is_restored: bool = False) -> Iterator[None]:
    """Checks attributes, hooks, tensors, gradients and the generator; tensors may be written where `is_restored`."""

    def list_hooks() -> list[int]:
        hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in every]
        return [len(kind) for kinds in hooks for kind in kinds] + [
            len(tensor._post_accumulate_grad_hooks or {}) for tensor in list_tensors().values()
        ]

    def list_tensors() -> dict[Any, Tensor]:
        states = [m.state_dict(keep_vars=True) for m in modules]
        by_name = {(at, name): tensor for at, state in enumerate(states) for name, tensor in state.items()}
        return by_name | dict(enumerate(also))

    every = [module for root in modules for module in root.modules()]
    attributes, hooks, generator = [dict(m.__dict__) for m in every], list_hooks(), torch.get_rng_state()
    before = {name: (tensor, tensor.clone(), tensor._version) for name, tensor in list_tensors().items()}
    gradients = {name: (t.grad, None if t.grad is None else t.grad.clone()) for name, (t, _, _) in before.items()}
    yield
    assert [dict(m.__dict__) for m in every] == attributes
    assert list_hooks() == hooks
    assert torch.equal(torch.get_rng_state(), generator)
    assert list_tensors().keys() == before.keys()
    for name, tensor in list_tensors().items():
        assert tensor is before[name][0], name
        assert tensor.equal(before[name][1]), name
        assert is_restored or tensor._version == before[name][2], name
        gradient, numbers = gradients[name]
        assert tensor.grad is gradient, name
        assert gradient is None or gradient.equal(numbers), name
