"""Programs drawn by a seed: on which the planner's memory is fitted on GPUs, and judged on all.

A seed is committed before the first of its programs is compiled. `fitted` are made-up models and
`judged` published sizes, without biases, nothing tied, on GPUs; `held`, `again` and `tpu` published
decoders as their config.json has them. `again` and `tpu` were drawn after the last fit, and so
were `products`, on GPUs, whose layers keep their products; `newer`, on TPUs, after `tpu` had
taught from how many tokens on a step has copies at the loss, and `last` after both had taught what
is copied; `fourth` after `last` and some chosen programs had taught from how many tokens on, and
with the loss in chunks; `latent`, DeepSeek's decoders alone, after those of `wide`; `staged`, in
stages, after six chosen programs had taught what of a task's result is there twice; `fifth`,
after all of these had taught where gradients are in the dtype of use, and that the head is gone
after the loss; `sixth`, after `fifth` had taught what one row and a tied head have at the loss;
`seventh` and `eighth`, with losses in chunks, after these had their gradient at once: the one to
learn from, the other to judge; `chunks`, on GPUs, after their programs no longer had a chunk's
numbers of words and zeros before the loop. `here` is for one GPU on which they run.
"""

import dataclasses
import functools
import json
import pathlib
import random
import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from plan_cases import Case, candidate

from shardwise import model, topology
from shardwise.plan import published, roles

DECODERS = pathlib.Path(__file__).parents[1] / "tests" / "decoders.json"
# (vocab, embed, heads, kv_heads, head_dim, mlp) as config.json has them; no biases, nothing tied.
PUBLISHED = {
    "Llama 3 8B": (128_256, 4096, 32, 8, 128, 14_336),
    "Llama 3 70B": (128_256, 8192, 64, 8, 128, 28_672),
    "Llama 3.2 3B": (128_256, 3072, 24, 8, 128, 8192),
    "Qwen 2.5 0.5B": (151_936, 896, 14, 2, 64, 4864),
    "Qwen 2.5 7B": (152_064, 3584, 28, 4, 128, 18_944),
    "Gemma 2 2B": (256_000, 2304, 8, 4, 256, 9216),
    "Phi 3 mini": (32_064, 3072, 32, 32, 96, 8192),
    "Mistral 7B": (32_000, 4096, 32, 8, 128, 14_336),
    "SmolLM 2 1.7B": (49_152, 2048, 32, 32, 64, 8192),
    "Mixtral 8x7B": (32_000, 4096, 32, 8, 128, 14_336),
}
_TYPES = dict(dtype=jnp.bfloat16, param_dtype=jnp.float32)
_MIXED = dict(experts=8, experts_per_token=2, capacity_factor=1.25)


def _made_up(rng):
    embed, width = rng.choice([1024, 1536, 2048, 3072, 4096, 5120, 8192]), rng.choice([64, 128])
    heads = embed // width
    sizes = dict(
        vocab=rng.choice([1024, 8192, 32_000, 50_304, 128_256, 151_936, 256_000]),
        embed=embed,
        layers=rng.choice([2, 4, 6, 32]),
        heads=heads,
        kv_heads=rng.choice([k for k in (heads, 8, 4) if heads % k == 0]),
        head_dim=width,
        mlp=int(rng.choice([2, 3, 3.5, 4]) * embed),
    )
    if rng.random() < 0.2:
        sizes |= _MIXED | {"mlp": sizes["mlp"] // 2}
    return "", model.Config(**sizes, **_TYPES)


def _published(rng):
    name = rng.choice(list(PUBLISHED))
    vocab, embed, heads, kv_heads, width, mlp = PUBLISHED[name]
    mixed = _MIXED if "Mixtral" in name else {}
    sizes = dict(vocab=vocab, embed=embed, heads=heads, kv_heads=kv_heads, head_dim=width, mlp=mlp)
    return name, model.Config(layers=rng.choice([2, 4, 8, 24]), **sizes, **mixed, **_TYPES)


def _by_config(rng, latent=False):
    """Of all decoders in the file, in its order, or of those with latent attention."""
    every = json.loads(DECODERS.read_text())
    of = {n: x["config"]["architectures"][0].startswith("Deepseek") for n, x in every.items()}
    name = rng.choice([n for n in every if of[n] == latent])
    config = published.of(every[name]["config"]).config
    return name, _cut(config, rng.choice([4, 8, 24] if latent else [2, 4, 8, 24]))


def _cut(config, layers):
    """A decoder with so many layers."""
    return dataclasses.replace(config, layers=layers)


def wide() -> dict[str, Case]:
    """Programs of many experts that fsdp cuts, or of wide latent attention, to fit what these need;
    of the last two, DeepSeek V3 without experts and with few words.
    """
    every = json.loads(DECODERS.read_text())
    lite, v2, v3, qwen = (
        published.of(every[name]["config"]).config
        for name in ("DeepSeek-V2-Lite", "DeepSeek-V2", "DeepSeek-V3", "Qwen3-30B-A3B")
    )
    none = dict(experts=0, shared_experts=0, router_bias=False, capacity_factor=None, dense_mlp=0)
    plain = dataclasses.replace(v3, dense_layers=0, layers=4, mlp=18_432, vocab=1024, **none)
    found = {
        "V2 Lite, fsdp": (_cut(lite, 5), "v5e:4x4", 16, 4096, dict(fsdp=16)),
        "V2 Lite, experts": (_cut(lite, 5), "v5e:4x4", 16, 4096, dict(fsdp=4, expert=4)),
        "V2 Lite, context": (_cut(lite, 5), "v5e:4x4", 8, 8192, dict(fsdp=8, context=2)),
        "V2": (_cut(v2, 4), "v5p:4x4x4", 128, 4096, dict(fsdp=8, expert=8)),
        "V3": (_cut(v3, 5), "v5p:4x4x4", 64, 4096, dict(fsdp=16, expert=4)),
        "Qwen 3 30B": (_cut(qwen, 4), "v5e:4x4", 16, 4096, dict(fsdp=16)),
        "V3, no experts": (plain, "v5p:2x2x4", 16, 4096, dict(fsdp=16)),
        "V3, no experts, two rows": (plain, "v5p:2x2x4", 32, 4096, dict(fsdp=16)),
    }
    return {
        f"fitted, wide: {name}": Case(config, chips, batch, size, roles.Roles(**by, remat=True))
        for name, (config, chips, batch, size, by) in found.items()
    }


def _nodes(numbers, rng):
    return f"{rng.choice(['h100', 'h100', 'a100', 'h200', 'b200'])}:{rng.choice(numbers)}x8"


def _torus(rng):
    shapes = {
        "v5e": ("2x4", "4x4", "8x8", "16x16"),
        "v5p": ("2x2x2", "4x4x4", "4x4x12"),
        "v6e": ("2x4", "4x4", "8x8"),
    }
    kind = rng.choice(list(shapes))
    return f"{kind}:{rng.choice(shapes[kind])}"


class Draw(NamedTuple):
    """A seed, how many programs, and what draws each one's model (named, or "") and its chips."""

    seed: int
    number: int
    model: Callable[[random.Random], tuple[str, model.Config]]
    chips: Callable[[random.Random], str]
    more: Mapping[str, bool] = types.MappingProxyType({})  # of each layout
    # Of the loss; of several, one, where tensor cuts no logits; of none, the planner's of that day,
    chunks: tuple[int, ...] = (1,)
    least: float = 1.0  # each of so many tokens for one of the model's width, or more.
    stages: bool = False


_few = functools.partial(_nodes, (1, 1, 2, 3, 4, 6, 16))
DRAWS = {
    "fitted": Draw(26, 60, _made_up, functools.partial(_nodes, (1, 1, 1, 2, 4, 8, 32))),
    "judged": Draw(20261125, 40, _published, _few),
    "held": Draw(27_112_026, 24, _by_config, _few),
    "again": Draw(28_112_026, 24, _by_config, _few),
    "tpu": Draw(29_112_026, 24, _by_config, _torus),
    "newer": Draw(1_122_026, 24, _by_config, _torus),
    "last": Draw(3_122_026, 24, _by_config, _torus),
    "fourth": Draw(28_112_029, 24, _by_config, _torus, chunks=(1, 1, 8)),
    "latent": Draw(28_112_030, 12, functools.partial(_by_config, latent=True), _torus),
    "staged": Draw(28_112_031, 6, _by_config, _torus, stages=True),
    "fifth": Draw(28_112_032, 24, _by_config, _torus, chunks=(1, 1, 8)),
    "sixth": Draw(29_112_033, 24, _by_config, _torus, chunks=(1, 1, 8)),
    "seventh": Draw(29_112_034, 24, _by_config, _torus, chunks=(8,)),
    "eighth": Draw(29_112_035, 24, _by_config, _torus, chunks=()),
    "chunks": Draw(29_112_037, 24, _by_config, _few, chunks=(), least=1.5),
    "here": Draw(28_112_027, 8, _by_config, lambda rng: "h200:1x1"),
    "products": Draw(30_112_026, 12, _by_config, _few, dict(remat=True, products=True)),
}


def drawn(which: str) -> dict[str, Case]:
    """The cases of one draw, by name; they depend on no estimate, but on what a device holds."""
    draw, found = DRAWS[which], {}
    rng = random.Random(draw.seed)
    while len(found) < draw.number:
        name, config = draw.model(rng)
        chips = topology.chips(draw.chips(rng))
        every = roles.every(chips.devices)
        division = rng.choice([r for r in every if (r.stage > 1) == draw.stages])
        sequence, rows = rng.choice([1024, 2048, 4096, 8192, 32_768]), rng.choice([1, 2, 4, 8])
        many = {"microbatches": rng.choice([1, 1, 1, 2, 4]), "remat": rng.random() < 0.6}
        if not draw.chunks:
            many["loss_chunks"] = _chunks(
                rows, sequence // division.context, draw.least * config.embed
            )
        elif draw.chunks == (8,) or (len(draw.chunks) > 1 and division.tensor == 1):
            many["loss_chunks"] = rng.choice(draw.chunks)
        if draw.stages:
            many["microbatches"] = division.stage * rng.choice([1, 2, 4])
        each = roles.Roles(**division.sizes, **many | draw.more)
        case = Case(config, str(chips), each.rows * rows * each.microbatches, sequence, each)
        if _can_be(case, chips):
            found[f"{which} {len(found) + 1}{', ' * bool(name)}{name}"] = case
    return found


def _chunks(rows, length, least):
    """As many chunks as the planner's loss had on the day of a draw."""
    most = max(1, rows * length // max(int(least), 1024))
    return max(n for n in (1, 2, 4, 8) if n <= most and length % n == 0)


def _can_be(case, chips):
    """Whether a layout can be, lies as people lay it, and leaves half of a device for the step."""
    r, tokens = case.roles, case.batch // case.roles.rows // case.roles.microbatches
    if max(r.tensor, r.context) > 8 or not 2048 <= tokens * case.sequence // r.context <= 32_768:
        return False
    if roles.refusal(r, case.config, chips, case.batch, case.sequence):
        return False
    held = candidate(case).memory
    return held.parameters + held.state < chips.chip.hbm_bytes / 3
