"""Training steps as operators: random ones, and a transformer's."""

import random
import re

from hypothesis import strategies as st

import pipedream as pd


def random_step(rng: random.Random) -> pd.Operators:
    """Returns operators some of which rename a tensor's dimensions, use expressions, or need a dimension whole."""
    sizes = {name: rng.choice((3, 4, 6, 8, 12)) for name in "abcde"}
    tensors: dict[str, tuple[int, ...]] = {}
    text: list[str] = []
    for at in range(rng.randint(1, 3)):
        tensors[f"i{at}"] = tuple(sizes[name] for name in rng.sample("abcde", rng.randint(0, 3)))
    for at in range(rng.randint(1, 7)):
        used: dict[str, int] = {}

        def index(size: int, used: dict[str, int] = used) -> str:
            fits = [name for name in "abcdef" if used.get(name, size) == size and sizes.get(name, size) == size]
            if rng.random() < 0.1 or not fits:
                return ":"
            name = rng.choice(fits)
            used[name] = size
            return name if rng.random() < 0.95 else f"{name} + 1"

        read = rng.sample(sorted(tensors), min(len(tensors), rng.randint(1, 2)))
        reads = [f"{name}[{', '.join(map(index, tensors[name]))}]" for name in read]
        plain = [name for name in used if any(name in access.replace(",", "]").split("[")[1] for access in reads)]
        result_indices = rng.sample(sorted({*plain, *rng.sample("abcde", 2)} & {*"abcde"}), rng.randint(0, 2))
        result_indices = [name for name in result_indices if used.get(name, sizes[name]) == sizes[name]]
        tensors[f"t{at}"] = tuple(sizes[name] for name in result_indices)
        text.append(f"t{at}[{', '.join(result_indices)}] += f({', '.join(reads)})")
    names = sorted(tensors)
    alike = [(name, other) for name in names for other in names if name < other and tensors[name] == tensors[other]]
    return pd.Operators(tensors, "\n".join(text), tuple(alike[:1]) if rng.random() < 0.5 else ())


def _draw_possible_step(seed: int) -> pd.Operators:
    rng = random.Random(seed)
    while True:
        try:
            return random_step(rng)
        except pd.errors.PlanError:  # an expression of an index whose size no tensor gives
            continue


steps = st.builds(_draw_possible_step, st.integers(0, 2**32))


class _Writer:
    """Writes forward lines, and backward lines before those of what was called earlier."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.tensors: dict[str, tuple[int, ...]] = {}
        self.forward: list[str] = []
        self.backward: list[str] = []
        self.weights: dict[str, str] = {}

    def add(self, forward: str, backward: str = "") -> None:
        """Adds lines in which `name<names>` is a tensor with the indices b l m d f h k v, in short."""
        self.forward += [self._read(line) for line in forward.splitlines() if line.strip()]
        self.backward[:0] = [self._read(line) for line in backward.splitlines() if line.strip()]

    def _read(self, line: str) -> str:
        def tensor(match: re.Match[str]) -> str:
            names = [_SHORT.get(letter, letter) for letter in match[2].split()]
            whole = tuple(self.sizes[_SHORT["c"] if name.isdecimal() else name] for name in names)
            self.tensors.setdefault(match[1], whole)
            return f"{match[1]}[{', '.join(names)}]"

        return re.sub(r"(\w+)<([\w ]*)>", tensor, line.strip())

    def update(self) -> list[str]:
        """Returns the lines of Adam."""
        lines = []
        for weight, names in self.weights.items():
            for line in (
                f"new_m_{weight}<{names}> = decay(m_{weight}<{names}>, d_{weight}<{names}>)",
                f"new_v_{weight}<{names}> = decay(v_{weight}<{names}>, d_{weight}<{names}>)",
                f"new_{weight}<{names}> = step({weight}<{names}>, new_m_{weight}<{names}>, new_v_{weight}<{names}>)",
            ):
                lines.append(self._read(line))
        return lines


_SHORT = {"b": "batch", "l": "length", "m": "memory", "d": "d_model", "f": "d_ff", "h": "heads", "k": "d_kv"}
_SHORT |= {"v": "vocab", "c": "key_value"}


SIZES = {"length": 512, "memory": 512, "d_model": 1024, "d_kv": 128, "vocab": 32128, "key_value": 2}
"""Of T5, but for what its sizes differ in: batch, d_ff and heads."""


def transformer(layers: int = 24, **sizes: int) -> pd.Operators:
    """Returns forward, backward and update of T5's layers, as in Mesh-TensorFlow: index names, one-hot words too."""
    writer = _Writer(SIZES | sizes)
    writer.weights["words"] = "v d"
    writer.add(
        "x0<b l d> += one_hot(ids<b l>) * words<v d>", "d_words<v d> += one_hot(ids<b l>) * d_x0<b l d> + d_out<v d>"
    )
    for at in range(layers):
        _add_attention(writer, f"{at}", f"x{2 * at}", f"x{2 * at + 1}")
        _add_feed_forward(writer, f"{at}", f"x{2 * at + 1}", f"x{2 * at + 2}")
    _add_norm(writer, "end", f"x{2 * layers}", "")
    writer.add(
        """logits<b l v> += normed_end<b l d> * words<v d>
           sums<b l> += exp(logits<b l v>)
           loss<> += pick(logits<b l v>, targets<b l>) - log(sums<b l>)""",
        """d_logits<b l v> = exp(logits<b l v>) / sums<b l> - one_hot(targets<b l>)
           d_out<v d> += d_logits<b l v> * normed_end<b l d>
           d_normed_end<b l d> += d_logits<b l v> * words<v d>""",
    )
    lines = [*writer.forward, *writer.backward, *writer.update()]
    alike = [
        (name, f"d_{name}", f"m_{name}", f"v_{name}", f"new_m_{name}", f"new_v_{name}", f"new_{name}")
        for name in writer.weights
    ]
    return pd.Operators(writer.tensors, "\n".join(lines), tuple(alike))


def _add_norm(writer: _Writer, layer: str, source: str, residual: str) -> None:
    """Adds T5's normalisation of a layer's input; its backward also adds the gradient of the residual."""
    n = f"normed_{layer}"
    writer.weights[f"scale_{layer}"] = "d"
    added = f" + d_{residual}<b l d>" if residual else ""
    writer.add(
        f"""squares_{layer}<b l> += square({source}<b l d>)
            {n}<b l d> = {source}<b l d> * squares_{layer}<b l> * scale_{layer}<d>""",
        f"""d_scale_{layer}<d> += d_{n}<b l d> * {source}<b l d> * squares_{layer}<b l>
            d_squares_{layer}<b l> += d_{n}<b l d> * {source}<b l d> * scale_{layer}<d>
            d_{source}<b l d> = back(d_{n}<b l d>, {source}<b l d>, scale_{layer}<d>, d_squares_{layer}<b l>){added}""",
    )


def _add_attention(writer: _Writer, at: str, source: str, target: str) -> None:
    layer = f"a{at}"
    _add_norm(writer, layer, source, target)
    writer.weights |= {f"query_{at}": "d h k", f"both_{at}": "d c h k", f"out_{at}": "h k d"}
    writer.add(
        f"""q{at}<b l h k> += normed_{layer}<b l d> * query_{at}<d h k>
            memory{at}<b m d> = normed_{layer}<b m d>
            kv{at}<b m c h k> += memory{at}<b m d> * both_{at}<d c h k>
            scores{at}<b h l m> += q{at}<b l h k> * kv{at}<b m 0 h k>
            sums{at}<b h l> += exp(scores{at}<b h l m>)
            p{at}<b h l m> = exp(scores{at}<b h l m>) / sums{at}<b h l>
            o{at}<b l h k> += p{at}<b h l m> * kv{at}<b m 1 h k>
            y{at}<b l d> += o{at}<b l h k> * out_{at}<h k d>
            {target}<b l d> = {source}<b l d> + y{at}<b l d>""",
        f"""d_out_{at}<h k d> += o{at}<b l h k> * d_{target}<b l d>
            d_o{at}<b l h k> += d_{target}<b l d> * out_{at}<h k d>
            d_p{at}<b h l m> += d_o{at}<b l h k> * kv{at}<b m 1 h k>
            d_sums{at}<b h l> += d_p{at}<b h l m> * p{at}<b h l m>
            d_scores{at}<b h l m> = p{at}<b h l m> * (d_p{at}<b h l m> - d_sums{at}<b h l>)
            d_q{at}<b l h k> += d_scores{at}<b h l m> * kv{at}<b m 0 h k>
            d_key{at}<b m h k> += d_scores{at}<b h l m> * q{at}<b l h k>
            d_value{at}<b m h k> += p{at}<b h l m> * d_o{at}<b l h k>
            d_kv{at}<b m c h k> = stack(d_key{at}<b m h k>, d_value{at}<b m h k>)
            d_both_{at}<d c h k> += memory{at}<b m d> * d_kv{at}<b m c h k>
            d_memory{at}<b m d> += d_kv{at}<b m c h k> * both_{at}<d c h k>
            d_query_{at}<d h k> += normed_{layer}<b l d> * d_q{at}<b l h k>
            from_q{at}<b l d> += d_q{at}<b l h k> * query_{at}<d h k>
            d_normed_{layer}<b l d> = from_q{at}<b l d> + d_memory{at}<b l d>""",
    )


def _add_feed_forward(writer: _Writer, at: str, source: str, target: str) -> None:
    layer = f"f{at}"
    _add_norm(writer, layer, source, target)
    writer.weights |= {f"in_{at}": "d f", f"down_{at}": "f d"}
    writer.add(
        f"""h{at}<b l f> += normed_{layer}<b l d> * in_{at}<d f>
            r{at}<b l f> = relu(h{at}<b l f>)
            z{at}<b l d> += r{at}<b l f> * down_{at}<f d>
            {target}<b l d> = {source}<b l d> + z{at}<b l d>""",
        f"""d_down_{at}<f d> += r{at}<b l f> * d_{target}<b l d>
            d_r{at}<b l f> += d_{target}<b l d> * down_{at}<f d>
            d_h{at}<b l f> = d_r{at}<b l f> * relu_back(h{at}<b l f>)
            d_in_{at}<d f> += normed_{layer}<b l d> * d_h{at}<b l f>
            d_normed_{layer}<b l d> += d_h{at}<b l f> * in_{at}<d f>""",
    )
