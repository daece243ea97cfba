"""Describes a model's training step: traces forward, backward and update, and lists torch's operators as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pipedream.core.errors import PlanError
from pipedream.core.operators.operator import Operator
from pipedream.core.operators.operators import Operators
from pipedream.sharding.decompositions import decompositions
from pipedream.sharding.descriptions import (
    Description,
    OperatorCall,
    contradiction,
    description_of,
    is_added,
    is_constant,
    is_drawn,
    other_operands,
    refusal,
    renamed,
)
from pipedream.sharding.whole_weights import steps_each_element

_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
"""What returns its operand; autograd calls it for each tensor that it keeps."""

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Numbers that a tensor decides."""

_Stepping = tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]
"""An optimizer, and its weights without data."""

Optimizer = Callable[[list[tuple[str, Any]]], torch.optim.Optimizer]


def operators(
    model: nn.Module, sample: Any, *, loss: Callable[[Any], Any] | None = None, optimizer: Optimizer | None = None
) -> Operators:
    """Describes one training step of a model: forward, backward and update.

    Parameters are named as `p_0_weight`, `s_0_weight_...` is the optimizer's state and `new_0_weight` what both become;
    buffers are `b_...`, inputs `x0`. Other tensors have the name of the operator that computes them.

    Args:
        sample: one minibatch: the model's only input, a tuple of positional or a mapping of keyword arguments.
        loss: from the model's output to a scalar; without it the gradients of the outputs are inputs, `d0`.
        optimizer: factory from named parameters to an optimizer that steps each element by itself.

    Raises:
        PlanError: an operator without a description, or an optimizer that needs whole weights.
    """
    return trace(model, sample, loss=loss, optimizer=optimizer).operators


@dataclass(frozen=True)
class DescribedCall:
    """A line of the text as a call.

    Attributes:
        call: with tensors without data.
        tensors: argument -> tensor; those of a list have a number after the argument's name.
        step: the line with the schema's names.
    """

    call: OperatorCall
    tensors: Mapping[str, str]
    step: Operator


@dataclass(frozen=True)
class TracedStep:
    """A training step as operators, which can be run.

    Attributes:
        calls: those of forward and backward, each the line of the same number of `operators.text`; updates follow.
        parameters, buffers: name in the model -> tensor.
        gradients: name in the model -> tensor.
        updated: of buffers.
        inputs: the tensors of the sample, in the order of its leaves.
        outputs: of the model, or the loss.
        tangents: gradients of the outputs, where there is no loss.
        input_gradients: of the floating-point inputs, where there is no loss.
        constants: tensor -> a function that makes it.
        drawn: those of the constants that are random numbers, in the order in which they are drawn.
    """

    operators: Operators
    calls: tuple[DescribedCall, ...]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    gradients: Mapping[str, str]
    updated: Mapping[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tangents: tuple[str, ...]
    input_gradients: tuple[str, ...]
    constants: Mapping[str, Callable[[], torch.Tensor]]
    drawn: tuple[str, ...]
    dtypes: Mapping[str, torch.dtype]


def trace(
    model: nn.Module, sample: Any, *, loss: Callable[[Any], Any] | None = None, optimizer: Optimizer | None = None
) -> TracedStep:
    """Traces a step; see `operators`."""
    return _Tracing(model, sample, loss).traced(optimizer)


@dataclass
class _Tracing:
    model: nn.Module
    sample: Any
    loss: Callable[[Any], Any] | None
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    _name: dict[fx.Node, str] = field(default_factory=dict)
    _lines: list[str] = field(default_factory=list)
    _calls: list[DescribedCall] = field(default_factory=list)
    _constants: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    _drawn: list[str] = field(default_factory=list)
    _checked: set[str] = field(default_factory=set)

    def traced(self, optimizer: Optimizer | None) -> TracedStep:
        trained = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        frozen = {name: one for name, one in self.model.named_parameters() if not one.requires_grad}
        buffers = dict(self.model.named_buffers())
        leaves = [one for one in tree_leaves(self.sample) if isinstance(one, torch.Tensor)]
        stepping = None if optimizer is None or not trained else _stepping(optimizer, trained)
        graph, outputs = self._graph(trained, frozen, buffers, leaves)
        nodes = iter(one for one in graph.graph.nodes if one.op == "placeholder")
        parameters = {name: self._placed(next(nodes), f"p_{name}") for name in (*trained, *frozen)}
        held = {name: self._placed(next(nodes), f"b_{name}") for name in buffers}
        inputs = tuple(self._placed(next(nodes), f"x{at}") for at in range(len(leaves)))
        tangents = tuple(self._placed(node, f"d{at}") for at, node in enumerate(nodes))
        for node in graph.graph.nodes:
            self._add(graph, node)
        found = iter(self._name[node] for node in tree_leaves(next(iter(reversed(graph.graph.nodes))).args[0]))
        made = tuple(next(found) for _ in range(outputs))
        gradients = {name: next(found) for name in trained}
        updated = {name: next(found) for name in buffers}
        alike: list[tuple[str, ...]] = [(parameters[name], gradients[name]) for name in trained]
        alike += [(held[name], updated[name]) for name in buffers if held[name] != updated[name]]
        self._add_updates(stepping, alike)
        return TracedStep(
            operators=Operators(self._shapes, "\n".join(self._lines), tuple(alike)),
            calls=tuple(self._calls),
            parameters=parameters,
            buffers=held,
            gradients=gradients,
            updated=updated,
            inputs=inputs,
            outputs=made,
            tangents=tangents,
            input_gradients=tuple(found),
            constants=self._constants,
            drawn=tuple(self._drawn),
            dtypes=self._dtypes,
        )

    def _graph(
        self,
        trained: Mapping[str, torch.Tensor],
        frozen: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        leaves: Sequence[torch.Tensor],
    ) -> tuple[fx.GraphModule, int]:
        """Returns forward and backward, and the number of outputs."""
        _, structure = tree_flatten(self.sample)
        everything = tree_leaves(self.sample)
        count = 0

        def step(
            parameters: dict[str, torch.Tensor],
            fixed: dict[str, torch.Tensor],
            held: dict[str, torch.Tensor],
            inputs: list[torch.Tensor],
            tangents: list[torch.Tensor],
        ) -> Any:
            own = {name: one.detach().requires_grad_() for name, one in parameters.items()}
            entering = [one.detach().requires_grad_(one.is_floating_point()) for one in inputs]
            changed = {name: one.clone() for name, one in held.items()}
            tensors = iter(entering)
            filled = [next(tensors) if isinstance(one, torch.Tensor) else one for one in everything]
            arguments, named = _arguments(tree_unflatten(filled, structure))
            with _holding(self.model, {**own, **fixed, **changed}):
                value = self.model(*arguments, **named)
            value = value if self.loss is None else self.loss(value)
            made = [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
            wanted = [*own.values(), *(one for one in entering if one.requires_grad and self.loss is None)]
            given = tangents or [torch.ones_like(one) for one in made]
            ends = [at for at, one in enumerate(made) if one.requires_grad]
            found = tuple(torch.zeros_like(one) for one in wanted)
            if wanted and ends:
                found = torch.autograd.grad(
                    [made[at] for at in ends],
                    wanted,
                    [given[at] for at in ends],
                    allow_unused=True,
                    materialize_grads=True,
                )
            nonlocal count
            count = len(made)
            return made, found[: len(own)], list(changed.values()), found[len(own) :]

        tangents = [] if self.loss is not None else [torch.ones_like(one) for one in self._outputs()]
        given = dict(trained), dict(frozen), dict(buffers), list(leaves), tangents
        fake: Any = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
        try:
            with _without_fused_operators(), self._device(), torch.enable_grad():
                graph = make_fx(step, **fake)(*given)
        except GuardOnDataDependentSymNode:
            raise _depends_on_numbers("a branch") from None
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if any(isinstance(one, _SYMBOLS) for one in (value.shape if isinstance(value, torch.Tensor) else [value])):
                raise _depends_on_numbers(f"{self._where(node.target)} calls {node.target}, whose result")
        # A second time, for autograd does not go with functionalize.
        pure = torch.func.functionalize(graph, remove="mutations")
        graph = make_fx(pure, decomposition_table=decompositions(), **fake)(*given)
        graph.graph.eliminate_dead_code()
        return graph, count

    def _outputs(self) -> list[torch.Tensor]:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), self._device():
            kept = {name: one.clone() for name, one in self.model.named_buffers()}
            arguments, named = _arguments(self.sample)
            with _holding(self.model, kept):
                value = self.model(*arguments, **named)
        return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]

    def _device(self) -> AbstractContextManager[object]:
        """Context in which a model on the meta device makes its other tensors there."""
        is_meta = any(one.is_meta for one in self.model.parameters())
        return torch.device("meta") if is_meta else nullcontext()

    def _placed(self, node: fx.Node, name: str) -> str:
        return self._tensor(name.replace(".", "_"), node.meta["val"], node)

    def _tensor(self, name: str, value: torch.Tensor, node: fx.Node | None = None) -> str:
        while name in self._shapes:
            name += "_"
        self._shapes[name] = tuple(value.shape)
        self._dtypes[name] = value.dtype
        if node is not None:
            self._name[node] = name
        return name

    def _add(self, graph: fx.GraphModule, node: fx.Node) -> None:
        """Adds a line for a call, or a tensor for a constant."""
        value = node.meta.get("val")
        if node.op == "get_attr":
            held = getattr(graph, str(node.target))
            self._constants[self._tensor(node.name, held, node)] = lambda: held
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            return  # several results, which are taken one by one
        called: fx.Node = node
        item: int | None = None
        if getattr(node.target, "__name__", "") == "getitem":
            called, item = cast(tuple[fx.Node, int], node.args)
        function: Any = called.target
        if function in _SAME:
            self._name[node] = self._name[cast(fx.Node, called.args[0])]
            return
        bound = _bound(function, called.args, called.kwargs)
        read = {one: self._name[one] for _, one in _nodes(bound)}
        made = {one: self._constants[name] for one, name in read.items() if name in self._constants}
        if is_constant(function) or is_drawn(function) or (made and len(made) == len(read) and not self._draws(read)):
            name = self._tensor(node.name, value, node)
            self._constants[name] = partial(_made, function, bound, made, item)
            self._drawn += [name] if is_drawn(function) else []
            return
        values = {key: fx.node.map_arg(one, lambda arg: arg.meta["val"]) for key, one in bound.items()}
        call = OperatorCall(function, item, values, value)
        text = self._text(call)
        tensors = {key: self._name[one] for key, one in _nodes(bound)}
        name = self._tensor(node.name, value, node)
        self._lines.append(renamed(text, tensors | {"out": name}))
        shapes = {key: tuple(one.shape) for key, one in call.tensors().items()}
        (step,) = Operators(shapes | {"out": tuple(value.shape)}, text).steps
        self._calls.append(DescribedCall(call, tensors, step))

    def _draws(self, read: Mapping[fx.Node, str]) -> bool:
        return any(name in self._drawn for name in read.values())

    def _text(self, call: OperatorCall) -> str:
        known = description_of(call)
        if known is None:
            raise PlanError(refusal(call.function, self._where(call.function)))
        if is_added(call.function):
            self._check(call, known)
        return known.text(call).replace(" f(", f" {call.function._schema.name.split('::')[-1].strip('_')}(", 1)

    def _check(self, call: OperatorCall, known: Description) -> None:
        text = known.text(call)
        if wrong := other_operands(call, text):
            raise PlanError(
                f"{call.function} was described as {text!r}, but {wrong}; write all of its tensors, "
                f"{', '.join(call.tensors())}, and its result as out"
            )
        others = {name: value for name, value in call.values.items() if not isinstance(value, torch.Tensor)}
        key = f"{call.function} {text} {[(one.shape, one.dtype) for one in call.tensors().values()]} {others}"
        if key not in self._checked and (index := contradiction(call, known)):
            raise PlanError(
                f"{call.function} was described as {text!r}, but on random numbers its parts along "
                f"{index!r} do not make the whole; write : for a dimension that it needs whole"
            )
        self._checked.add(key)

    def _where(self, function: Any) -> str:
        """Returns which layer calls an operator, in words."""
        with _Callers(self.model, function) as callers:
            self._outputs()
        if callers.found is None:
            return "the step, in its backward or loss,"
        return f"the layer {callers.found!r}" if callers.found else "the model's own forward"

    def _add_updates(self, stepping: _Stepping | None, alike: list[tuple[str, ...]]) -> None:
        """Adds a line for each updated weight and each state of the optimizer."""
        if stepping is None:
            return
        made, empty = stepping
        for one in empty.values():
            one.grad = torch.empty_like(one)
        made.step()
        for at, (name, one) in enumerate(empty.items()):
            weight, gradient = alike[at]
            states = [
                self._tensor(f"s_{name}_{key}".replace(".", "_"), value)
                for key, value in made.state.get(one, {}).items()
                if isinstance(value, torch.Tensor) and value.shape == one.shape
            ]
            letters = ", ".join("abcdefgh"[: one.dim()])
            read = ", ".join(f"{tensor}[{letters}]" for tensor in (weight, gradient, *states))
            results = [self._tensor(f"new_{tensor[2:]}", one) for tensor in (weight, *states)]
            self._lines += [f"{result}[{letters}] = step({read})" for result in results]
            alike[at] = (weight, gradient, *states, *results)


class _Callers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the innermost layer of a model that calls an operator."""

    def __init__(self, model: nn.Module, function: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None
        self._model, self._function = model, function
        self._inside: list[str] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> _Callers:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._inside.pop() and None))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _name(func) == _name(self._function) and self.found is None and self._inside:
            self.found = self._inside[-1]
        return func(*args, **(kwargs or {}))


@contextmanager
def _holding(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Context in which a model has other parameters and buffers, also one that does not register its modules."""
    known = {id(one): name for name, one in (*model.named_parameters(), *model.named_buffers())}
    slots = [
        (cast(dict[str, Any], own), key, one)
        for module in dict.fromkeys(model.modules())
        for own in (module._parameters, module._buffers)
        for key, one in own.items()
        if one is not None and known.get(id(one)) in tensors
    ]
    try:
        for own, key, one in slots:
            dict.__setitem__(own, key, tensors[known[id(one)]])
        yield
    finally:
        for own, key, one in slots:
            dict.__setitem__(own, key, one)


@contextmanager
def _without_fused_operators() -> Iterator[None]:
    """Context in which attention and recurrent layers call simple operators."""
    mkldnn: Any = torch.backends.mkldnn  # its own context warns where TF32 is not available
    before = mkldnn.set_flags(False, _fp32_precision=None)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        mkldnn.set_flags(before[0], _fp32_precision=None)


def _stepping(optimizer: Optimizer, trained: Mapping[str, torch.Tensor]) -> _Stepping:
    empty = {name: nn.Parameter(torch.empty_like(one, device="meta")) for name, one in trained.items()}
    made = optimizer(list(empty.items()))
    if not steps_each_element(made):
        raise PlanError(
            f"the optimizer {type(made).__name__} needs whole weights, so that its step has no description; use "
            "one that steps each element by itself, such as SGD or Adam, or describe the model without an optimizer"
        )
    return made, empty


def _depends_on_numbers(what: str) -> PlanError:
    return PlanError(
        f"{what} depends on the numbers of a tensor, so that the operators differ from step to step and cannot be "
        "described; compute with tensors of fixed sizes, as torch.where does, or use a layout by hand"
    )


def _name(function: Any) -> str:
    """Returns an operator's name, that of its in-place form too."""
    return str(function._schema.name).rstrip("_")


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (sample if isinstance(sample, tuple) else (sample,)), {}


def _bound(function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, defaults too."""
    schema = function._schema.arguments
    found = {one.name: one.default_value for one in schema if one.has_default_value()}
    return found | {one.name: value for one, value in zip(schema, arguments, strict=False)} | dict(named)


def _nodes(bound: Mapping[str, Any]) -> Iterator[tuple[str, fx.Node]]:
    """Yields the tensors among arguments; those of a list have a number after its name."""
    for name, value in bound.items():
        if isinstance(value, fx.Node):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}{at}", one) for at, one in enumerate(value) if isinstance(one, fx.Node))


def _made(
    function: Any, bound: Mapping[str, Any], made: Mapping[fx.Node, Callable[[], torch.Tensor]], item: int | None
) -> torch.Tensor:
    """Calls what depends on sizes and other constants alone; other tensors give size, dtype and device."""

    def like(node: fx.Node) -> torch.Tensor:
        value: torch.Tensor = node.meta["val"]
        return made[node]() if node in made else torch.empty(value.shape, dtype=value.dtype, device=value.device)

    filled = fx.node.map_arg(dict(bound), like)
    found = function(**filled)
    return found if item is None else found[item]  # type: ignore[no-any-return]
