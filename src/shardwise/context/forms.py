"""What all forms share: bytes that they send, by formula, and a shard_map around attention."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from shardwise import marks
from shardwise.mesh import axes_of

Axis = str | tuple[str, ...]  # one mesh axis, or several as one


class Sent(NamedTuple):
    """The bytes that one device sends in one layer's attention, by `form.bytes_sent(n, q, k)`.

    Over n devices, for q and k of the whole sequence, of which shapes and dtypes count. K and V,
    or what they and q are turned into, travel with 12 bytes for each token's places, sums of dK and
    dV in float32. A layer that is rematerialised sends the forward bytes twice.
    """

    forward: int
    backward: int


def sizes(n: int, q: Any, k: Any) -> tuple[int, int, int, int]:
    """Bytes of a device's n-th of q [b, S, h, d], of k [b, S, kv_heads, d] (and as many of v), of
    dK in float32, and of the tokens' places.
    """
    queries, keys = math.prod(q.shape) // n, math.prod(k.shape) // n
    places = 3 * 4 * q.shape[0] * (q.shape[1] // n)
    return queries * q.dtype.itemsize, keys * k.dtype.itemsize, keys * 4, places


@dataclasses.dataclass(frozen=True)
class Within:
    """`form` for whole arrays under jit: manual over `axis`, which cuts the sequence, and `rows`.

    Other mesh axes stay the compiler's. Name in `rows` those that cut rows: whether a tile is
    skipped is then asked of a device's rows alone. Name in `heads` those that cut heads where the
    form is a kernel, which the compiler cannot cut; `axis` is () where none cuts the sequence.
    """

    mesh: Mesh | AbstractMesh
    axis: Axis
    form: Callable
    rows: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    def __call__(self, q, k, v, places, mask=marks.causal):
        here = jax.sharding.get_abstract_mesh()
        tokens = P(self.rows or None, self.axis or None)
        spec = P(*tokens, self.heads or None)
        run = jax.shard_map(
            lambda q, k, v, places: self.form(q, k, v, places, mask),
            mesh=self.mesh if here.empty else here,
            in_specs=(spec, spec, spec, tokens),
            out_specs=spec,
            axis_names={*self.rows, *axes_of(self.axis), *self.heads},
            check_vma=False,
        )
        return run(q, k, v, places)
