"""Hooks for the tensors that autograd saves, which let a forward use torch.func."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph


class HooksOutsideFunc(graph.saved_tensors_hooks):
    """Hooks that are off within `grad`, `vjp`, `jacrev` and `hessian` of torch.func, which refuse to run under any."""

    def __enter__(self) -> None:
        super().__enter__()
        self._disabling = graph.disable_saved_tensors_hooks
        setattr(graph, "disable_saved_tensors_hooks", self._step_aside)  # noqa: B010  (torch.func reads it when called)

    def __exit__(self, *error: Any) -> None:
        setattr(graph, "disable_saved_tensors_hooks", self._disabling)  # noqa: B010
        super().__exit__(*error)

    @contextmanager
    def _step_aside(self, message: str) -> Iterator[None]:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or hooks[0] is not self.pack_hook:  # another thread, or the forward's own hooks
            with self._disabling(message):
                yield
            return
        super().__exit__()
        try:
            with self._disabling(message):
                yield
        finally:
            super().__enter__()
