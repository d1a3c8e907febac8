"""The pieces into which a sharding cuts an array, as rectangles of a matrix."""

from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import Sharding


class Piece(NamedTuple):
    """A rectangle of a matrix, by its edges: rows and columns from the first on, before the end."""

    top: float
    bottom: float
    left: float
    right: float

    @property
    def size(self) -> float:
        """The number of its entries."""
        return (self.bottom - self.top) * (self.right - self.left)

    @property
    def words(self) -> str:
        return f"[{self.top}:{self.bottom}, {self.left}:{self.right}]"

    def box(self, x: float = 0, y: float = 0, scale: float = 1) -> tuple[float, ...]:
        """(left, top, width, height) in a picture whose matrix begins at (x, y)."""
        wide, high = self.right - self.left, self.bottom - self.top
        return x + scale * self.left, y + scale * self.top, scale * wide, scale * high


def pieces(sharding: Sharding, shape: Sequence[int], inputs: int = 1) -> list[Piece]:
    """What each device holds of an array whose first `inputs` axes are drawn as rows.

    The others are its columns. Devices come in the order of the sharding, which is the mesh's.
    ValueError tells of a block that is no rectangle of the matrix.
    """
    return [
        Piece(*_range(index[:inputs], shape[:inputs]), *_range(index[inputs:], shape[inputs:]))
        for index in sharding.devices_indices_map(tuple(shape)).values()
    ]


def _range(index, sizes):
    """First and end of the entries at `index`, of axes that are drawn as one."""
    first = last = 0
    entries = 1
    for cut, size in zip(index, sizes, strict=True):
        start, stop, _ = cut.indices(size)
        first, last = first * size + start, last * size + stop - 1
        entries *= stop - start
    if last + 1 - first != entries:
        raise ValueError(
            f"figures: of axes {tuple(sizes)} drawn as one, a block {index} is no interval; cut "
            f"the first of them alone."
        )
    return first, last + 1
