"""Llama's names for what the decoder has: the fields of `config.json`, the weights and their axes.

A letter is an axis: l layers, v vocab, e embed, h heads, k kv_heads, d head_dim, m mlp. A word is
an axis of the file's array, into which its letters are merged, the last one fastest: q_proj,
"hd e", is the matrix from embed to all heads, transposed, whose row h * head_dim + d is entry d of
head h. Rotary positions pair d with d + head_dim / 2 here and there, so that no row moves.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardwise.model import Config

CONFIG = "config.json"
ARCHITECTURE = "LlamaForCausalLM"
DTYPES = ("float32", "bfloat16", "float16")
SHOWN = 10  # of the names that differ; whole models may
_SIZES = dict(
    vocab="vocab_size",
    embed="hidden_size",
    layers="num_hidden_layers",
    heads="num_attention_heads",
    mlp="intermediate_size",
)
# What decides a weight's shape or a logit; the rest of Config is how it runs.
_COMPARED = (*_SIZES, "kv_heads", "head_dim", "rope_theta", "norm_epsilon")
# The one value of each that the decoder computes, which is also what a missing field means.
_ONLY = dict(
    hidden_act="silu",
    attention_bias=False,
    mlp_bias=False,
    partial_rotary_factor=1.0,
    quantization_config=None,
)
_FIELDS = dict(v="vocab", e="embed", h="heads", k="kv_heads", d="head_dim", m="mlp", l="layers")


class Weight(NamedTuple):
    """A weight's name, of which "{}" is the layer's number, and the letters of both sides."""

    name: str
    theirs: str
    ours: str

    @property
    def orders(self) -> tuple[str, str]:
        """All letters but layers, in the order of the file's axes and in the parameter's."""
        return self.theirs.replace(" ", ""), self.ours.removeprefix("l")

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the file's array."""
        return tuple(math.prod(sizes[letter] for letter in word) for word in self.theirs.split())

    def names(self, config: Config) -> list[str]:
        """The names of the arrays that are this weight: one for each layer, or one."""
        return [self.name.format(i) for i in range(config.layers)] if self.stacked else [self.name]

    @property
    def stacked(self) -> bool:
        """Whether the parameter holds all layers, of which the file's array is one."""
        return self.ours.startswith("l")


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_LAYER = "model.layers.{}."

# In the order in which a token passes them: that of the files.
WEIGHTS = {
    "embed/kernel": Weight(EMBEDDING, "v e", "ve"),
    "blocks/attention_norm/scale": Weight(_LAYER + "input_layernorm.weight", "e", "le"),
    "blocks/q/kernel": Weight(_LAYER + "self_attn.q_proj.weight", "hd e", "lehd"),
    "blocks/k/kernel": Weight(_LAYER + "self_attn.k_proj.weight", "kd e", "lekd"),
    "blocks/v/kernel": Weight(_LAYER + "self_attn.v_proj.weight", "kd e", "lekd"),
    "blocks/o/kernel": Weight(_LAYER + "self_attn.o_proj.weight", "e hd", "lhde"),
    "blocks/mlp_norm/scale": Weight(_LAYER + "post_attention_layernorm.weight", "e", "le"),
    "blocks/gate/kernel": Weight(_LAYER + "mlp.gate_proj.weight", "m e", "lem"),
    "blocks/up/kernel": Weight(_LAYER + "mlp.up_proj.weight", "m e", "lem"),
    "blocks/down/kernel": Weight(_LAYER + "mlp.down_proj.weight", "e m", "lme"),
    "final_norm/scale": Weight("model.norm.weight", "e", "e"),
    "head/kernel": Weight(HEAD, "v e", "ev"),
}


def sizes(config: Config) -> dict[str, int]:
    """The size of each letter."""
    return {letter: getattr(config, field) for letter, field in _FIELDS.items()}


def check_dense(config: Config) -> None:
    """Raise ValueError for a decoder that is no Llama."""
    parts = "experts tied qkv_bias qk_norm norms activation rope_dim value_dim latent"
    for name in parts.split():
        if (value := getattr(config, name)) != getattr(Config, name):
            raise ValueError(
                f"llama: Config.{name} is {value!r}, and {ARCHITECTURE} has "
                f"{getattr(Config, name)!r}; shardwise.checkpoint saves any decoder."
            )


def config(folder: str | Path) -> Config:
    """The decoder's `model.Config` by a folder's `config.json`, in the dtype that it names.

    Raises:
      FileNotFoundError: there is no `config.json`.
      ValueError: a field is missing; another architecture or dtype; or what is not read here:
        biases, another activation than silu, scaled rotary positions, quantized weights.
    """
    fields, where = read(folder), Path(folder, CONFIG)
    if missing := [name for name in _SIZES.values() if name not in fields]:
        raise ValueError(f"llama: {where} lacks {', '.join(missing)}; a config.json has them all.")
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ValueError(f"llama: {where} has the dtype {dtype!r}; expected {', '.join(DTYPES)}.")
    given = {ours: fields[theirs] for ours, theirs in _SIZES.items()}
    return Config(
        **given,
        kv_heads=fields.get("num_key_value_heads") or given["heads"],
        head_dim=fields.get("head_dim") or given["embed"] // given["heads"],
        rope_theta=_rope_theta(where, fields),
        norm_epsilon=fields.get("rms_norm_eps", 1e-6),
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.dtype(dtype),
    )


def read(folder: str | Path) -> dict[str, Any]:
    """The fields of a folder's `config.json`, which is a Llama's that the decoder computes."""
    where = Path(folder, CONFIG)
    if not where.exists():
        raise FileNotFoundError(f"llama: no {where}; the folder of a {ARCHITECTURE} has one.")
    fields = json.loads(where.read_text())
    if (found := fields.get("architectures") or []) != [ARCHITECTURE]:
        raise ValueError(
            f"llama: {where} has the architectures {found}; expected {[ARCHITECTURE]}."
        )
    for name, only in _ONLY.items():
        if (value := fields.get(name, only)) != only and value is not None:
            raise ValueError(f"llama: {where} has {name}={value!r}; the decoder has {only!r}.")
    return fields


def _rope_theta(where, fields):
    rope = fields.get("rope_parameters") or {}  # of transformers 5
    scaling = fields.get("rope_scaling") or {}
    for name, each in {"rope_parameters": rope, "rope_scaling": scaling}.items():
        kind = each.get("rope_type", each.get("type", "default"))
        if kind != "default" or each.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"llama: {where} has {name}={each!r}; the decoder turns all of head_dim, by "
                f"unscaled positions (rope_type 'default')."
            )
    return float(rope.get("rope_theta", fields.get("rope_theta", 10_000.0)))


def check_same(folder: str | Path, ours: Config, theirs: Config) -> None:
    """Raise ValueError where a config that was given is not of the folder's weights."""
    differ = [name for name in _COMPARED if getattr(ours, name) != getattr(theirs, name)]
    if differ:
        told = "; ".join(f"{n} {getattr(theirs, n)}, not {getattr(ours, n)}" for n in differ)
        raise ValueError(
            f"llama: {Path(folder, CONFIG)} and the config that was given differ: there it is "
            f"{told}. Start from llama.config(folder), with dataclasses.replace."
        )


def check_arrays(label: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ValueError where arrays are missing, or unexpected, or have another shape."""
    told = [
        f"{name} is {found.get(name, 'missing')}, expected {wanted.get(name, 'nothing')}"
        for name in {**found, **wanted}
        if found.get(name) != wanted.get(name)
    ]
    if told:
        more = f"; and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
        raise ValueError(f"llama: {label}: {'; '.join(told[:SHOWN])}{more}.")


def text(config: Config, dtype: str, more: dict[str, Any]) -> str:
    """The text of `config.json`."""
    fields = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "torch_dtype": dtype,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    # Theirs by default are tokens 1 and 2, which mean nothing of the kind here.
    free = {"bos_token_id": None, "eos_token_id": None}
    if decided := sorted(set(fields) & set(more)):
        raise ValueError(
            f"llama: the config decides {', '.join(decided)}; fields={{...}} adds others to "
            f"{CONFIG}, such as max_position_embeddings."
        )
    return json.dumps(fields | free | more, indent=2) + "\n"
