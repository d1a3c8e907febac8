"""What all forms share: bytes that they send, by formula, and a shard_map around attention."""

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


def sizes(n: int, q: Any, k: Any) -> tuple[int, int, int, int]:
    """Bytes of a device's n-th of q [b, S, h, d], of k [b, S, kv_heads, d] (and as many of v), of
    dK in float32, and of the tokens' places.
    """
    queries, keys = math.prod(q.shape) // n, math.prod(k.shape) // n
    places = 3 * 4 * q.shape[0] * (q.shape[1] // n)
    return queries * q.dtype.itemsize, keys * k.dtype.itemsize, keys * 4, places


def bytes_sent(form: Any, n: int, q: Any, k: Any) -> Sent:
    """(forward, backward): the bytes that one device sends in one layer's attention by `form`.

    Over n devices, for q and k of the whole sequence, of which shapes and dtypes count. K and V,
    or what they and q are turned into, travel with 12 bytes for each token's places, sums of dK and
    dV in float32. A layer that is rematerialised sends the forward bytes twice.
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
        cuts = ("rows", q.shape[0], self.rows), ("tokens", q.shape[1], axes_of(self.axis))
        cuts += ("heads", q.shape[2], self.heads), ("kv heads", k.shape[2], self.heads)
        for what, size, axes in cuts:
            n = parts(mesh, axes)
            check_divides("within", what, size, n, f"{n} devices of mesh axis {', '.join(axes)}")
        tokens = P(self.rows or None, self.axis or None)
        spec = P(*tokens, self.heads or None)
        run = jax.shard_map(
            lambda *given: self.form(*given, mask),
            mesh=mesh,
            in_specs=(spec, spec, spec, tokens),
            out_specs=spec,
            axis_names={*self.rows, *axes_of(self.axis), *self.heads},
            check_vma=False,
        )
        return run(q, k, v, places)


def check_divides(who: str, what: str, size: int, n: int, among: str) -> None:
    """Raise ValueError, with sizes that would do, where a size does not divide among n parts."""
    if n < 1 or size < 1 or size % n:
        below = size // max(n, 1) * n
        near = f"{below} or {below + n}" if below else f"{n}"
        raise ValueError(
            f"context.{who}: {size} {what} do not divide among {among}; expected a multiple of "
            f"{n}, such as {near}."
        )
