"""Models in a line: parts by name, and a forward that uses them."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Built(nn.Module):
    """Has these parts (modules, parameters or anything else), and calls `function` on itself and its inputs."""

    def __init__(self, function: Callable[..., Any] | None, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.function(self, *inputs, **options)
