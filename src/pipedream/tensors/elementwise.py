"""Optimizers that step each element of a weight by itself."""

from inspect import unwrap

import torch
from torch import optim
from torch.optim.optimizer import _global_optimizer_pre_hooks

_ELEMENTWISE = {
    unwrap(kind.step)
    for kind in (
        *(optim.SGD, optim.ASGD, optim.RMSprop, optim.Rprop, optim.Adagrad, optim.Adadelta),
        *(optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    )
}


def steps_each_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's that can step a part of a weight, without hooks; others may need all weights."""
    if unwrap(type(optimizer).step) not in _ELEMENTWISE or optimizer._optimizer_step_pre_hooks:
        return False
    step = vars(optimizer).get("step")  # a learning-rate scheduler counts its calls
    is_replaced = step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step
    return not (is_replaced or _global_optimizer_pre_hooks or optimizer._optimizer_step_post_hooks)
