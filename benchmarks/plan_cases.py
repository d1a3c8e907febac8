"""Pairs of model and layout: what the memory formula is fitted on, and what it is judged by.

No model of the one set is in the other: those judged have other widths, heads, vocabularies and
experts. Few layers are enough for most: the compiler's work, and its way, hardly depend on depth;
but of many, what is held of all of them shows, and what may wait on the host.
Rows are so many that what a layer works on is too large for a chip's own memory (VMEM), as in a run
that fills its chips: smaller arrays never come to HBM.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp

from shardwise import model, plan, topology
from shardwise.costs.arrays import Arrays
from shardwise.plan import arrays, planning, roles


class Case(NamedTuple):
    """A model and a layout on some chips."""

    config: model.Config
    chips: str
    batch: int
    sequence: int
    roles: roles.Roles


def told(each: roles.Roles) -> str:
    """A layout with the chunks of its loss."""
    return f"{each}" + (f", loss in {each.loss_chunks} chunks" if each.loss_chunks > 1 else "")


@functools.cache
def candidate(case: Case) -> plan.Candidate:
    """The layout by formula."""
    given = case.config, _arrays(case.config), topology.chips(case.chips)
    return planning.candidate(case.roles, *given, case.batch, case.sequence)


@functools.cache
def _arrays(config):
    """Of one layer's, which cases of many depths share: tracing a decoder is most of the work."""
    if config.dense_layers:  # in a stack of their own
        return arrays.of_decoder(config)
    one = arrays.of_decoder(dataclasses.replace(config, layers=1))
    deep = (
        tuple(x._replace(shape=(config.layers, *x.shape[1:])) if x.stacked else x for x in each)
        for each in (one.parameters, one.state)
    )
    return Arrays(*deep)


def _case(config, chips, batch, sequence, **sizes):
    return Case(config, chips, batch, sequence, roles.Roles(**sizes))


def _deep(config, layers):
    return dataclasses.replace(config, layers=layers)


_HELD = dict(head_dim=128, dtype=jnp.bfloat16, param_dtype=jnp.float32)
_MIXED = dict(experts=8, experts_per_token=2, capacity_factor=1.25)
SMALL = model.Config(
    vocab=1024, embed=1024, layers=2, heads=8, kv_heads=8, mlp=4096, **_HELD
)  # fmt: skip
DEEPER = dataclasses.replace(SMALL, layers=4)
WORDS = dataclasses.replace(SMALL, vocab=8192)
MORE = dataclasses.replace(DEEPER, vocab=32_768)
MIXED = dataclasses.replace(DEEPER, mlp=2048, **_MIXED)

GROUPED = model.Config(
    vocab=32_000, embed=2048, layers=4, heads=16, kv_heads=4, mlp=7168, **_HELD
)  # fmt: skip
NARROW = dataclasses.replace(GROUPED, head_dim=64, heads=32, kv_heads=8, layers=6, vocab=50_304)
SEVEN = model.Config(
    vocab=32_000, embed=4096, layers=4, heads=32, kv_heads=32, mlp=11_008, **_HELD
)  # fmt: skip
EIGHT = dataclasses.replace(GROUPED, embed=1536, heads=12, mlp=3584, **_MIXED)
SHARED = dataclasses.replace(
    EIGHT, experts=16, experts_per_token=4, mlp=1024, shared_experts=1, vocab=16_384
)

# As Gemma 2 2B's, whose vocabulary is large beside its width.
GEMMA = model.Config(
    vocab=256_000, embed=2304, layers=4, heads=8, kv_heads=4, mlp=9216, tied=True, norms="both",
    activation="gelu", **_HELD | dict(head_dim=256)
)  # fmt: skip
DEEP = dataclasses.replace(SMALL, layers=16)
_AWAY = dict(remat=True, offload=True)
_PRODUCTS = dict(remat=True, products=True)

FITTED = {
    "remat": _case(SMALL, "v5e:2x4", 64, 1024, fsdp=8, remat=True),
    "remat, vocabulary": _case(WORDS, "v5e:2x4", 64, 1024, fsdp=8, remat=True),
    "all kept": _case(DEEPER, "v5e:2x4", 64, 1024, fsdp=8),
    "all kept, vocabulary": _case(MORE, "v5e:2x4", 64, 1024, fsdp=8),
    "data, all kept": _case(MORE, "v5e:2x4", 64, 1024, data=8),
    "tensor, remat": _case(DEEPER, "v5e:2x4", 64, 1024, fsdp=4, tensor=2, remat=True),
    "tensor": _case(DEEPER, "v5e:2x4", 64, 1024, fsdp=4, tensor=2),
    "context, remat": _case(DEEPER, "v5e:2x4", 32, 2048, fsdp=4, context=2, remat=True),
    "context": _case(DEEPER, "v5e:2x4", 32, 2048, fsdp=4, context=2),
    "microbatches, remat": _case(DEEPER, "v5e:2x4", 256, 1024, fsdp=8, microbatches=4, remat=True),
    "microbatches": _case(DEEPER, "v5e:2x4", 256, 1024, fsdp=8, microbatches=4),
    "experts, remat": _case(MIXED, "v5e:2x4", 64, 1024, fsdp=8, remat=True),
    "experts": _case(MIXED, "v5e:2x4", 32, 1024, fsdp=8),
    "expert axis, remat": _case(MIXED, "v5e:2x4", 64, 1024, fsdp=2, expert=4, remat=True),
    "expert axis": _case(MIXED, "v5e:2x4", 32, 1024, expert=8),
    "tensor, vocabulary, remat": _case(MORE, "v5e:2x4", 128, 1024, fsdp=4, tensor=2, remat=True),
    "context and tensor": _case(
        DEEPER, "v5p:2x2x2", 32, 2048, fsdp=2, context=2, tensor=2, remat=True
    ),
    "16 layers, remat": _case(DEEP, "v5e:2x4", 256, 1024, fsdp=8, remat=True),
    "16 layers, context": _case(DEEP, "v5e:2x4", 64, 4096, fsdp=4, context=2, remat=True),
    "16 layers, tensor": _case(DEEP, "v5e:2x4", 128, 1024, fsdp=2, tensor=4, remat=True),
    "offload": _case(DEEP, "v5e:2x4", 256, 1024, fsdp=8, **_AWAY),
    "offload, tensor": _case(DEEP, "v5e:2x4", 256, 1024, fsdp=4, tensor=2, **_AWAY),
    "offload, context": _case(DEEP, "v5e:2x4", 64, 4096, fsdp=4, context=2, **_AWAY),
    "llama3-8b": _case(plan.preset("llama3-8b"), "v5e:16x16", 256, 2048, fsdp=256, remat=True),
    "llama3-8b, long rows": _case(
        plan.preset("llama3-8b"), "v5e:16x16", 256, 8192, fsdp=256, remat=True
    ),
}

JUDGED = {
    "stages, remat": _case(
        NARROW, "v6e:2x4", 256, 1024, stage=2, data=4, microbatches=8, remat=True
    ),
    "four stages, remat": _case(
        SEVEN, "v5e:4x4", 128, 1024, stage=4, fsdp=4, microbatches=8, remat=True
    ),
    "stages, tensor, remat": _case(
        GROUPED, "v5e:4x4", 128, 1024, stage=2, fsdp=2, tensor=4, microbatches=4, remat=True
    ),
    "stages, context, remat": _case(
        GROUPED, "v5p:2x2x2", 32, 4096, stage=2, fsdp=2, context=2, microbatches=4, remat=True
    ),
    "stages, experts, remat": _case(
        EIGHT, "v5e:4x4", 256, 1024, stage=2, fsdp=2, expert=4, microbatches=4, remat=True
    ),
    "unequal stages, remat": _case(
        _deep(SEVEN, 7), "v5e:4x4", 128, 1024, stage=4, fsdp=4, microbatches=8, remat=True
    ),
    "products": _case(GROUPED, "v5e:4x4", 128, 1024, fsdp=16, **_PRODUCTS),
    "products, tensor": _case(SEVEN, "v5p:2x2x2", 32, 2048, fsdp=2, tensor=4, **_PRODUCTS),
    "vocabulary": _case(GEMMA, "v5e:4x4", 32, 8192, fsdp=16, remat=True),
    "vocabulary, loss in chunks": _case(
        GEMMA, "v5e:4x4", 32, 8192, fsdp=16, remat=True, loss_chunks=8
    ),
    "llama3-8b, products": _case(
        plan.preset("llama3-8b"), "v5e:16x16", 256, 8192,
        fsdp=64, context=4, microbatches=4, **_PRODUCTS
    ),
    "llama3-70b, products": _case(
        plan.preset("llama3-70b"), "v5p:4x4x8", 512, 8192,
        fsdp=64, context=2, microbatches=8, **_PRODUCTS
    ),
    "llama3-70b, offload": _case(
        plan.preset("llama3-70b"), "v6e:8x8", 64, 8192, fsdp=64, **_AWAY
    ),
    "llama3-70b, fsdp": _case(
        plan.preset("llama3-70b"), "v5p:4x4x8", 512, 8192, fsdp=128, remat=True
    ),
}  # fmt: skip
