"""Kernels for whole sequences on a device: Pallas' splash attention on TPUs, cuDNN's on GPUs."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from shardwise import marks

LANES = 128  # of a TPU's vector registers: what tiles, and head_dim, are multiples of
_BLOCKS = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")


@dataclasses.dataclass(frozen=True)
class Splash:
    """Attention on one device by JAX's splash kernel, which keeps no scores: for TPUs alone.

    A meaning of `marks.attend` for causal attention to whole sequences, packed documents included,
    in tiles of at most `block` tokens. Tokens have to stand in their own order: a sequence whose
    `places.index` is another yields NaN. `interpret` runs it on any device, slowly, for tests.

    Raises:
      ValueError: at the call, a mask but `marks.causal`, or a sequence that 128 does not divide.
      NotImplementedError: JAX 0.7's, when lowered for TPUs in stages beside tensor.
    """

    block: int = 512
    interpret: bool = False

    def __call__(self, q, k, v, places, mask=marks.causal):
        _check_causal("splash", mask)
        # Imported where it is used: Pallas' TPU half takes its time, and few need it.
        from jax.experimental.pallas.ops.tpu import splash_attention as splash

        size, heads, depth = q.shape[1:]
        width = v.shape[-1]
        tile = _tile(size, self.block)
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([splash.CausalMask((size, size))] * heads),
            block_sizes=splash.BlockSizes(**{f"block_{name}": tile for name in _BLOCKS}),
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )
        segments = splash.SegmentIds(places.documents, places.documents)

        def heads_first(x):
            lanes = [(0, 0)] * 3 + [(0, -x.shape[-1] % LANES)]
            return jnp.pad(x, lanes).transpose(0, 2, 1, 3)

        scaled = (q * depth**-0.5).astype(q.dtype)
        with marks.kernels(**_flops(*q.shape, width, tile)):
            out = jax.vmap(kernel)(*map(heads_first, (scaled, k, v)), segments)
        out = out.transpose(0, 2, 1, 3)[..., :width].astype(v.dtype)
        ordered = jnp.all(places.index == jnp.arange(size)[None], axis=1)
        return jnp.where(ordered[:, None, None, None], out, jnp.nan)


@dataclasses.dataclass(frozen=True)
class Cudnn:
    """Attention on one device by cuDNN's fused kernel, which keeps no scores: for NVIDIA's GPUs.

    A meaning of `marks.attend` for causal attention to whole sequences, each one document in its
    own order: a row in which documents are packed, or tokens stand in another order, yields NaN.
    With the implementation "xla" it runs on any device, and keeps the scores, for tests.

    Raises:
      ValueError: at the call, another mask than `marks.causal`, values of another size than keys,
        or a dtype of other than 16 bits.
      RuntimeError, NotImplementedError: JAX's own, where there is no cuDNN, or a `head_dim` that
        the kernel does not take (above 128, or no multiple of 8).
    """

    implementation: Literal["cudnn", "xla"] = "cudnn"

    def __call__(self, q, k, v, places, mask=marks.causal):
        _check_causal("cudnn", mask)
        if k.shape[-1] != v.shape[-1]:
            raise ValueError(
                f"context.cudnn: heads of v have {v.shape[-1]} entries and those of k "
                f"{k.shape[-1]}, which the kernel does not take; take context.tiled."
            )
        if self.implementation == "cudnn" and q.dtype not in (jnp.bfloat16, jnp.float16):
            raise ValueError(
                f"context.cudnn: q is {q.dtype}, and the kernel computes in bfloat16 or float16; "
                f"let the model compute in bfloat16 (model.Config(dtype=jnp.bfloat16), or "
                f"--model.dtype bfloat16), or take context.tiled (--layout.kernel tiles)."
            )
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=self.implementation
        )
        known = places.index == jnp.arange(q.shape[1])[None]
        known &= places.documents == places.documents[:, :1]
        return jnp.where(jnp.all(known, axis=1)[:, None, None, None], out, jnp.nan)


def _check_causal(who, mask):
    if mask is not marks.causal:
        raise ValueError(
            f"context.{who}: the mask {getattr(mask, '__name__', mask)!r} is a function of "
            f"places, and the kernel knows marks.causal alone; leave kernel= out, or use "
            f"attention by tiles, context.ring and its like."
        )


def _flops(rows, size, heads, depth, width, tile):
    """{a part of a kernel's name: FLOPs}: products of the tiles that are not all masked."""
    tiles = (size // tile) * (size // tile + 1) // 2
    d, v = (2 * rows * heads * tiles * tile**2 * (x + -x % LANES) for x in (depth, width))
    # Scores and output; scores again, and the gradients of both, of q, and of k and v.
    return {"fwd": d + v, "dq": 2 * d + v, "dkv": 2 * (d + v)}


def _tile(size, block):
    """The largest multiple of LANES, up to `block`, that divides `size`."""
    fit = [t for t in range(LANES, min(block, size) + 1, LANES) if size % t == 0]
    if not fit:
        raise ValueError(
            f"context.splash: a sequence of {size} tokens is no multiple of {LANES}, which the "
            f"kernel's tiles are; pad it to {-(-size // LANES) * LANES}, with a mask of 0, and "
            f"expected block={block} to be {LANES} or more."
        )
    return fit[-1]
