"""What all forms share: bytes that they send, by formula, and a shard_map around attention.

Tests compare the formulas with compiled programs.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from shardwise import marks
from shardwise.mesh import axes_of, parts

Axis = str | tuple[str, ...]  # one mesh axis, or several as one


class Sent(NamedTuple):
    """What `bytes_sent` returns."""

    forward: int
    backward: int


class Sizes(NamedTuple):
    """Bytes of one device's arrays: queries, keys (as many as values), dK in float32, places."""

    queries: int
    keys: int
    gradients: int
    places: int


def sizes(n: int, q: Any, k: Any) -> Sizes:
    """The `Sizes` of q [b, S, h, d] and k [b, S, kv_heads, d], of which a device has an n-th."""
    queries, keys = math.prod(q.shape) // n, math.prod(k.shape) // n
    b, length = q.shape[:2]
    places = 3 * 4 * b * (length // n)
    return Sizes(queries * q.dtype.itemsize, keys * k.dtype.itemsize, keys * 4, places)


def bytes_sent(form: Any, n: int, q: Any, k: Any) -> Sent:
    """(forward, backward): the bytes that one device sends in one layer's attention by `form`.

    Over n devices, for q and k of the whole sequence, of which shapes and dtypes count.

    Each sends K and V, or what it turns them and q into, and with them 12 bytes for each token's
    places. Sums of dK and dV travel in float32. A layer that is rematerialised sends the forward
    bytes twice.
    """
    return form.bytes_sent(n, q, k)


@dataclasses.dataclass(frozen=True)
class Within:
    """`form` for whole arrays under jit: manual over `axis`, which cuts the sequence, and `rows`.

    Other mesh axes stay the compiler's. Name in `rows` those that cut rows: whether a tile is
    skipped is then asked of a device's rows alone. Name in `heads` those that cut heads where the
    form is a kernel, which the compiler cannot cut; `axis` is () where none cuts the sequence.

    Raises:
      ValueError: at the call, a sequence, rows or heads that do not divide.
    """

    mesh: Mesh | AbstractMesh
    axis: Axis
    form: Callable
    rows: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    def __call__(self, q, k, v, places, mask=marks.causal):
        here = jax.sharding.get_abstract_mesh()
        mesh = self.mesh if here.empty else here
        self._check(mesh, q, k)
        tokens = P(self.rows or None, self.axis or None)
        spec = P(*tokens, self.heads or None)

        def local(q, k, v, places):
            return self.form(q, k, v, places, mask)

        manual = {*self.rows, *axes_of(self.axis), *self.heads}
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(spec, spec, spec, tokens),
            out_specs=spec,
            axis_names=manual,
            check_vma=False,
        )(q, k, v, places)

    def _check(self, mesh, q, k):
        cuts = (
            ("rows", q.shape[0], self.rows),
            ("tokens", q.shape[1], axes_of(self.axis)),
            ("heads", q.shape[2], self.heads),
            ("kv heads", k.shape[2], self.heads),
        )
        for what, size, axes in cuts:
            n = parts(mesh, axes)
            if size % n:
                below = size // n * n
                near = f"{below} or {below + n}" if below else f"{n}"
                raise ValueError(
                    f"context.within: {size} {what} do not divide among the {n} devices of mesh "
                    f"axis {', '.join(axes)}; expected a multiple of {n}, such as {near}."
                )
