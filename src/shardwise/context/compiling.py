"""A form under code that the compiler lays out: a shard_map around attention alone."""

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from shardwise import marks
from shardwise.context.counting import Axis


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

        manual = {*self.rows, *_names(self.axis), *self.heads}
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
            ("tokens", q.shape[1], _names(self.axis)),
            ("heads", q.shape[2], self.heads),
            ("kv heads", k.shape[2], self.heads),
        )
        for what, size, axes in cuts:
            n = 1
            for axis in axes:
                n *= mesh.shape[axis]
            if size % n:
                below = size // n * n
                near = f"{below} or {below + n}" if below else f"{n}"
                raise ValueError(
                    f"context.within: {size} {what} do not divide among the {n} devices of mesh "
                    f"axis {', '.join(axes)}; expected a multiple of {n}, such as {near}."
                )


def _names(axis):
    return (axis,) if isinstance(axis, str) else axis
