"""Operators on tensors that are sharded compute what they compute on whole ones, and none gathers without being
seen."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import pipedream as pd
from pipedream.extensions.meshes.sharding import attention, replicate, split
from pipedream.extensions.meshes.sharding.local_rules import LocalRules, NoHiddenGathers

Cut = Callable[[int | None], DTensor]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tested",))
    dist.destroy_process_group()


@pytest.fixture
def cut(mesh: DeviceMesh) -> Cut:
    """Returns a tensor of 4 by 4 that is sharded along a dimension."""

    def distribute(dim: int | None) -> DTensor:
        part = torch.rand([2 if at == dim else 4 for at in range(2)])
        return DTensor.from_local(part, mesh, [Replicate() if dim is None else Shard(dim)]).requires_grad_()

    return distribute


HIDDEN: dict[str, Callable[[Cut], Any]] = {
    "add": lambda cut: cut(0) + cut(1),
    "named arguments": lambda cut: torch.add(input=cut(0), other=cut(1)),
    "in place": lambda cut: cut(0).clone().add_(cut(1)),
    "a list": lambda cut: torch.cat([cut(0), cut(0)]),
    "lists": lambda cut: torch._foreach_add([cut(0)], [cut(1)]),
    "softmax": lambda cut: cut(1).softmax(1),
    "backward": lambda cut: cut(0).sin().backward(cut(1)),
    "recomputed": lambda cut: checkpoint(lambda x: x.sin(), cut(0), use_reentrant=False).backward(cut(1)),
}
ASKED: dict[str, Callable[[Cut], Any]] = {
    "redistribute": lambda cut: cut(0).redistribute(placements=[Replicate()]) + cut(None),
    "replicate": lambda cut: replicate(cut(0)).softmax(0).backward(cut(None)),
    "split": lambda cut: (split(cut(0), 1, "tested") + cut(1)).backward(cut(1)),
    "full_tensor": lambda cut: cut(0).full_tensor().sum().backward(),
    "sum": lambda cut: (cut(0) * cut(0)).sum().backward(),
    "product": lambda cut: cut(1) @ cut(0),
}
RANDOM: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {  # and the operator that draws
    "rand_like": (torch.rand_like, "rand_like"),
    "dropout": (lambda x: torch.dropout(x, 0.5, True), "bernoulli_"),
    "exponential": (lambda x: x.detach().exponential_(), "exponential_"),
    "multinomial": (lambda x: torch.multinomial(x, 1), "multinomial"),
    "rrelu": (lambda x: F.rrelu(x, training=True), "rrelu_with_noise"),
}
UNDRAWN: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: F.alpha_dropout(x, 0.5, training=False),
    lambda x: F.rrelu(x, training=False),
)


@pytest.mark.parametrize("within", [LocalRules, NoHiddenGathers])
class TestNoHiddenGathers:
    @pytest.mark.parametrize("name", HIDDEN)
    def test_an_operator_that_gathers_is_refused(self, cut: Cut, within: Any, name: str) -> None:
        words = "would have to gather tensors that the layout shards"
        with pytest.raises(pd.PipelineError, match=words), NoHiddenGathers(), within():
            HIDDEN[name](cut)

    @pytest.mark.parametrize("name", ASKED)
    def test_what_is_asked_for_is_not(self, cut: Cut, within: Any, name: str) -> None:
        with NoHiddenGathers(), within():
            ASKED[name](cut)

    @pytest.mark.parametrize("name", RANDOM)
    @pytest.mark.filterwarnings("ignore:DTensor random operators")
    def test_numbers_are_not_drawn_for_parts(self, cut: Cut, within: Any, name: str) -> None:
        function, operator = RANDOM[name]
        with NoHiddenGathers():
            with within():
                function(cut(None))
            words = rf"{operator} draws random numbers for a tensor of \(4, 4\)"
            with pytest.raises(pd.PipelineError, match=words), within():
                function(cut(0))

    @pytest.mark.parametrize("function", UNDRAWN)
    def test_functions_that_draw_none_now_may_see_parts(self, cut: Cut, within: Any, function: Any) -> None:
        x = cut(0)
        with NoHiddenGathers(), within():
            torch.testing.assert_close(function(x).to_local(), function(x.to_local()))

    def test_another_follows_an_error(self, cut: Cut, within: Any) -> None:
        with NoHiddenGathers():
            for _ in range(2):
                with pytest.raises(pd.PipelineError, match="would have to gather"), within():
                    HIDDEN["add"](cut)
                with within():
                    ASKED["replicate"](cut)

    def test_sums_stay_pending(self, cut: Cut, within: Any) -> None:
        """Looking changes nothing, in a backward by torch's engine as a stage runs it."""
        weight = cut(None)
        output, gradient = F.linear(cut(0), weight), cut(0).detach()
        with NoHiddenGathers(), within():
            _engine_run_backward((output,), (gradient,), False, False, (), accumulate_grad=True)
        assert weight.grad.placements == (Partial(),)


WHOLE = Replicate()
EMBEDDINGS: tuple[tuple[Placement, Placement, Placement], ...] = (  # words, weight, result
    (WHOLE, WHOLE, WHOLE),
    (Shard(0), WHOLE, Shard(0)),
    (Shard(1), WHOLE, Shard(1)),
    (WHOLE, Shard(0), Partial()),
    (WHOLE, Shard(1), Shard(2)),
)


def _compare_embeddings() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    torch.manual_seed(0)
    words, weight, rows = torch.randint(8, (4, 6)), torch.randn(8, 2), torch.randn(4, 6, 2)

    def on_mesh(words: Any, weight: torch.Tensor, cut: tuple[Placement, Placement], **options: Any) -> Any:
        x = distribute_tensor(words, mesh, cut[:1])
        w = distribute_tensor(weight, mesh, cut[1:]).requires_grad_()
        with LocalRules():
            looked_up = F.embedding(x, w, **options)
            assert isinstance(looked_up, DTensor)
            (looked_up * distribute_tensor(rows, mesh, [WHOLE])).sum().full_tensor().backward()  # type: ignore[no-untyped-call]
        assert isinstance(w.grad, DTensor)
        return looked_up.placements, looked_up.full_tensor(), w.grad.full_tensor()

    for padding_idx in (None, 1, -1):  # rows of the first and of the second rank
        whole = weight.clone().requires_grad_()
        output = F.embedding(words, whole, padding_idx)
        (output * rows).sum().backward()  # type: ignore[no-untyped-call]
        for cut_words, cut_weight, placed in EMBEDDINGS:
            placements, looked_up, gradient = on_mesh(words, weight, (cut_words, cut_weight), padding_idx=padding_idx)
            assert placements == (placed,)
            torch.testing.assert_close(looked_up, output)
            torch.testing.assert_close(gradient, whole.grad)
    options = {"max_norm": 1.0, "scale_grad_by_freq": True, "sparse": True}
    for (name, option), cut in product(options.items(), ((Shard(0), WHOLE), (WHOLE, Shard(0)))):
        with pytest.raises(pd.PipelineError, match=rf"an embedding with {name} .* the layout shards its words"):
            on_mesh(words, weight, cut, **{name: option})
    for outside in (-1, 8):
        with pytest.raises(IndexError):
            on_mesh(torch.full_like(words, outside), weight, (WHOLE, Shard(0)))


@dataclass(frozen=True)
class Call:
    """A function of tensors, the first of which are sharded, and the result's placement or the error's words."""

    function: Callable[..., Any]
    sizes: tuple[tuple[int, ...], ...]
    cuts: tuple[Placement, ...]
    expected: Placement | str
    options: dict[str, Any] = field(default_factory=dict)

    def check(self, mesh: DeviceMesh) -> None:
        """Compares the result and the gradients with those of whole tensors."""
        torch.manual_seed(0)
        plain = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in self.sizes]
        leaves = [
            distribute_tensor(tensor.detach(), mesh, [cut]).requires_grad_()
            for tensor, cut in zip(plain, self.cuts + (WHOLE,) * (len(plain) - len(self.cuts)), strict=True)
        ]
        if isinstance(self.expected, str):
            with LocalRules(), implicit_replication(), pytest.raises(pd.PipelineError, match=self.expected):
                self.function(*leaves, **self.options)
            return
        output = self.function(*plain, **self.options)
        weight = torch.randn_like(output)
        gradients = torch.autograd.grad((output * weight).sum(), plain)
        with LocalRules(), implicit_replication(), NoHiddenGathers():
            result = self.function(*leaves, **self.options)
        assert result.placements == (self.expected,), self
        back = torch.autograd.grad((result * distribute_tensor(weight, mesh, [WHOLE])).sum(), leaves)
        for tensor, expected in zip((result, *back), (output, *gradients), strict=True):
            torch.testing.assert_close(tensor.full_tensor(), expected, rtol=0, atol=1e-12)


X, TWO, THREE, FOUR = (4, 4, 5, 5), *({"groups": count} for count in (2, 3, 4))
CONVOLUTIONS = (
    Call(F.conv2d, (X, (8, 4, 3, 3), (8,)), (Shard(0),), Shard(0), {"padding": 1}),
    Call(F.conv2d, (X, (8, 4, 3, 3), (8,)), (WHOLE, Shard(0), Shard(0)), Shard(1), {"padding": "same"}),
    Call(F.conv2d, (X, (8, 4, 3, 3), (8,)), (WHOLE, Shard(1)), Partial(), {"stride": 2}),
    Call(F.conv2d, (X, (8, 2, 3, 3), (8,)), (Shard(0),), Shard(0), TWO),
    Call(F.conv2d, (X, (8, 2, 3, 3), (8,)), (WHOLE, Shard(0), Shard(0)), Shard(1), TWO),
    Call(F.conv2d, (X, (8, 1, 3, 3), (8,)), (Shard(1), Shard(0), Shard(0)), Shard(1), FOUR),
    Call(F.conv2d, ((4, 3, 5, 5), (6, 1, 3, 3)), (WHOLE, Shard(0)), "with 3 groups was asked for, but 2", THREE),
    Call(F.conv2d, (X, (8, 2, 3, 3)), (WHOLE, Shard(1)), "conv2d with 2 groups of tensors", TWO),
    Call(F.conv1d, ((4, 6), (8, 4, 3), (8,)), (WHOLE, Shard(0)), Shard(0)),
    Call(F.conv_transpose2d, (X, (4, 6, 3, 3), (6,)), (Shard(0),), Shard(0), {"stride": 2, "output_padding": 1}),
    Call(F.conv_transpose2d, (X, (4, 6, 3, 3), (6,)), (WHOLE, Shard(1), Shard(0)), Shard(1), {"stride": 2}),
    Call(F.conv_transpose2d, (X, (4, 6, 3, 3), (6,)), (WHOLE, Shard(0)), Partial(), {"padding": 1}),
    Call(F.conv_transpose1d, ((4, 4, 5), (4, 3, 3), (6,)), (WHOLE, Shard(0)), Shard(1), TWO),
    Call(F.conv_transpose1d, ((4, 4, 5), (4, 2, 3)), (WHOLE, Shard(1)), "1d with 2 groups of tensors", TWO),
)
NAMED = (
    Call(lambda x: F.dropout(input=x, p=0.0), ((4, 4),), (Shard(0),), Shard(0)),
    Call(lambda x: F.layer_norm(input=x, normalized_shape=(4,)), ((4, 4),), (Shard(0),), Shard(0)),
    Call(lambda x: F.group_norm(input=x, num_groups=2), ((4, 4),), (Shard(1),), Shard(1)),
    Call(lambda w: F.embedding(input=torch.arange(3), weight=w), ((4, 4),), (Shard(1),), Shard(1)),
)


def _mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> Any:
    """With a mask that is learned, and dropout."""
    torch.manual_seed(0)
    return attention(q, k, v, attn_mask=mask, dropout_p=0.3)


QUERIES, KEYS = (2, 4, 6, 4), (2, 4, 7, 4)
HEADS = (  # of queries, and of keys and values
    Call(attention, ((2, 8, 3, 4), *[(2, 2, 3, 4)] * 2), (Shard(1),) * 3, Shard(1), {"enable_gqa": True}),
    Call(attention, ((2, 8, 3, 4), *[(2, 2, 3, 4)] * 2), (Shard(1),), Shard(1), {"enable_gqa": True}),
    Call(attention, ((2, 12, 3, 4), *[(2, 3, 3, 4)] * 2), (Shard(1),), "2 ranks .* 3 of keys", {"enable_gqa": True}),
    Call(attention, ((12, 3, 4), *[(3, 3, 4)] * 2), (Shard(0),) * 3, "2 ranks .* 3 of keys", {"enable_gqa": True}),
    Call(attention, ((2, 3, 3, 4),) * 3, (Shard(1),) * 3, "there are 3 heads of queries"),
    Call(attention, ((3, 3, 4),) * 3, (Shard(0),) * 3, Shard(0)),
    Call(attention, ((2, 3, 4, 4),) * 3, (Shard(2),) * 3, "2 ranks shard the length, .* but there are 3 heads"),
    *(Call(attention, (QUERIES,) * 3, (Shard(cut),), Shard(cut), {"is_causal": True}) for cut in range(3)),
    *(Call(_mask, (QUERIES, *[KEYS] * 2, (6, 7)), (Shard(cut),), Shard(cut)) for cut in range(3)),
    *(Call(_mask, (QUERIES, *[KEYS] * 2, (2, 4, 6, 7)), (Shard(cut),) * 3, Shard(cut)) for cut in range(2)),
)


def _attend(*projected: torch.Tensor, kind: str = "heads") -> Any:
    """As a model does: of `projected` [batch, length, width], of 4 heads."""
    heads = [x.view(2, 6, 4, 2).transpose(1, 2) for x in projected]
    if kind == "length":
        heads = [split(x, 2, "model") for x in heads]
    attended = attention(*heads)
    if kind != "heads":
        torch.manual_seed(0)  # the order in memory decides which element gets which number
        attended = F.dropout(attended, 0.5)
    attended = attended.transpose(1, 2)
    return attended.reshape(2, 6, 8) if kind == "heads" else attended.contiguous().view(2, 6, 4, 2)


def _drop_transposed(x: torch.Tensor, dim: int) -> torch.Tensor:
    torch.manual_seed(0)
    return F.dropout(split(x.transpose(0, 1), dim, "model"), 0.5)


PROJECTED = ((2, 6, 8),) * 3
IN_MEMORY = (
    # The rules leave one out: its gradient is gathered, and then viewed as it was.
    Call(_attend, PROJECTED, (WHOLE, Shard(2), Shard(2)), Shard(2)),
    Call(_attend, PROJECTED, (Shard(2), WHOLE, Shard(2)), Shard(2)),
    Call(_attend, PROJECTED, (Shard(2), Shard(2), WHOLE), Shard(2)),
    Call(_attend, PROJECTED, (Shard(2),) * 3, Shard(2), {"kind": "dropout"}),
    Call(_attend, PROJECTED, (Shard(0),) * 3, Shard(0), {"kind": "dropout"}),
    Call(_attend, PROJECTED, (WHOLE,) * 3, Shard(1), {"kind": "length"}),
    *(Call(_drop_transposed, ((4, 6, 2),), (cut,), Shard(1), {"dim": 1}) for cut in (WHOLE, Shard(0), Shard(1))),
    *(Call(_drop_transposed, ((4, 6, 2),), (cut,), Shard(2), {"dim": 2}) for cut in (WHOLE, Shard(0), Shard(2))),
)
REFUSED = "cannot be computed where"
POOLING = (
    Call(F.avg_pool1d, ((4, 4, 6),), (Shard(1),), Shard(1), {"kernel_size": 2}),
    Call(F.avg_pool1d, ((4, 6),), (Shard(0),), Shard(0), {"kernel_size": 2}),
    Call(F.avg_pool1d, ((4, 6),), (Shard(1),), REFUSED, {"kernel_size": 2}),
    Call(F.max_pool2d, ((4, 6, 6),), (Shard(0),), Shard(0), {"kernel_size": 2}),
    Call(F.max_pool2d, ((4, 6, 6),), (Shard(1),), REFUSED, {"kernel_size": 2}),
    Call(F.adaptive_avg_pool3d, (X,), (Shard(1),), REFUSED, {"output_size": 1}),
    Call(F.interpolate, (X,), (Shard(1),), Shard(1), {"scale_factor": 2}),
    Call(F.interpolate, (X,), (Shard(0),), Shard(0), {"scale_factor": 2, "mode": "bilinear"}),
)
CALLS = {"convolutions": CONVOLUTIONS, "named": NAMED, "heads": HEADS, "in memory": IN_MEMORY, "pooling": POOLING}


def _check(name: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    for call in CALLS[name]:
        call.check(mesh)


def test_a_wrong_input_of_a_convolution_is_torch_s_error(cut: Cut) -> None:
    with LocalRules(), pytest.raises(RuntimeError, match=r"input to conv3d"):
        F.conv3d(cut(0), torch.randn(8, 4, 3, 3, 3))


def _compare_batch_norms() -> None:
    """Statistics are of the whole batch, in float32."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    torch.manual_seed(0)
    x = torch.randn(4, 4, 3) + 1
    for dtype, weights, autocast, cut in (
        *((torch.float64, torch.float64, False, at) for at in (0, 1)),
        (torch.bfloat16, torch.float32, True, 0),
        (torch.bfloat16, torch.bfloat16, False, 1),
    ):
        whole, parts = (nn.BatchNorm1d(4, dtype=weights) for _ in range(2))
        inputs = x.to(dtype)
        part = distribute_tensor(inputs, mesh, [Shard(cut)])
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                expected = whole(inputs)
                with LocalRules(), implicit_replication(), NoHiddenGathers():
                    output = parts(part)
            assert output.dtype == expected.dtype
            near = 1e-12 if dtype == torch.float64 else 0.02
            torch.testing.assert_close(output.full_tensor(), expected, rtol=near, atol=near)
            torch.testing.assert_close(parts.state_dict(), whole.state_dict())
            whole.eval(), parts.eval()
    sharded = distribute_tensor(torch.randn(1, 4), mesh, [Shard(1)])
    with LocalRules(), implicit_replication(), pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.BatchNorm1d(4)(sharded)


@pytest.mark.processes
@pytest.mark.parametrize("check", [_compare_embeddings, _compare_batch_norms, *CALLS])
def test_functions_compute_with_parts_what_they_do_with_whole_tensors(check: Callable[[], None] | str) -> None:
    processes.team(2).results(*((_check, check) if isinstance(check, str) else (check,)))
