"""Random meshes, and random cuts of tensors over them."""

from __future__ import annotations

from hypothesis import strategies as st

from pipedream import Mesh

__all__ = ["MESHES", "placements"]

MESHES = st.lists(st.integers(1, 3), max_size=2).map(
    lambda sizes: Mesh(",".join(f"m{n}:{size}" for n, size in enumerate(sizes)))
)


def placements(draw: st.DrawFn, mesh: Mesh, dimensions: int) -> tuple[int | None, ...]:
    """No dimension of the tensor is cut twice."""
    free = draw(st.permutations([*range(dimensions), None, None]))
    return tuple(free[: len(mesh.dimensions)])
