"""Ulysses: tokens of all heads are exchanged for all tokens of some heads (Jacobs et al., 2023)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardwise import marks
from shardwise.context.counting import Axis, Sent, sizes
from shardwise.context.gathering import gather_places, in_tiles


@dataclasses.dataclass(frozen=True)
class Ulysses:
    """Attention to the whole sequence by an n-th of the heads, with all-to-alls before and after.

    A meaning for `marks.attend` inside a shard_map that is manual over `axis`. n has to divide the
    kv heads, each of which is first copied `copies` times. `local(q, k, v, query, key, mask)`
    computes attention on the device; query and key are Places, here the same.

    Raises:
      ValueError: at the call, n does not divide the heads or the copied kv heads.
    """

    axis: Axis
    copies: int = 1
    local: Callable = in_tiles

    def __call__(self, q, k, v, places, mask=marks.causal):
        self._check(jax.lax.axis_size(self.axis), q.shape[2], k.shape[2])
        if self.copies > 1:
            k, v = (jnp.repeat(x, self.copies, axis=2) for x in (k, v))
        everywhere = gather_places(self.axis, places, q)
        q, k, v = (jax.lax.all_to_all(x, self.axis, 2, 1, tiled=True) for x in (q, k, v))
        out = self.local(q, k, v, everywhere, everywhere, mask)
        return jax.lax.all_to_all(out, self.axis, 1, 2, tiled=True)

    def bytes_sent(self, n: int, q: Any, k: Any) -> Sent:
        """The `Sent`: (n - 1) / n of q, copied K and V, and the output; forward, also places."""
        size = sizes(n, q, k)
        exchanged = 2 * (size.queries + self.copies * size.keys) * (n - 1) // n
        return Sent(exchanged + (n - 1) * size.places, exchanged)

    def _check(self, n, heads, kv_heads):
        if heads % n:
            fit = [i for i in range(1, heads + 1) if heads % i == 0]
            raise ValueError(
                f"context.ulysses: {heads} heads do not divide among {n} devices; {heads} heads "
                f"do among {fit}, and ring and all_gather work for any number."
            )
        group = heads // kv_heads
        if group % self.copies or (kv_heads * self.copies) % n:
            fit = [i for i in range(1, kv_heads + 1) if kv_heads % i == 0]
            copies = [c for c in range(1, group + 1) if group % c == 0 and kv_heads * c % n == 0]
            raise ValueError(
                f"context.ulysses: {kv_heads} kv heads, copied {self.copies} times for {heads} "
                f"heads, do not divide among {n} devices. Cut over {fit} devices, copy each kv "
                f"head copies={copies[0]} times, or use ring or all_gather."
            )
