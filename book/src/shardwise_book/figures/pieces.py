"""The pieces into which a sharding cuts an array, as rectangles of a matrix."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
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

    Raises:
      ValueError: a block is no rectangle of the matrix.
    """
    return [
        Piece(*_range(index[:inputs], shape[:inputs]), *_range(index[inputs:], shape[inputs:]))
        for index in sharding.devices_indices_map(tuple(shape)).values()
    ]


def _range(index, sizes):
    """First and end of the entries at `index`, of axes that are drawn as one."""
    found = np.arange(math.prod(sizes)).reshape(sizes)[index].ravel()
    first, end = int(found[0]), int(found[-1]) + 1
    if end - first != found.size:
        raise ValueError(
            f"figures: of axes {tuple(sizes)} drawn as one, a block {index} is no interval; cut "
            f"the first of them alone."
        )
    return first, end
