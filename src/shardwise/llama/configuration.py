"""`config.json`: the decoder's Config as the fields that `LlamaForCausalLM` reads."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from shardwise.model import Config

NAME = "config.json"
ARCHITECTURE = "LlamaForCausalLM"
DTYPES = ("float32", "bfloat16", "float16")
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


def config(folder: str | Path) -> Config:
    """The decoder's `model.Config` by a folder's `config.json`, in the dtype that it names.

    Raises:
      FileNotFoundError: there is no `config.json`.
      ValueError: another architecture than LlamaForCausalLM, or what the decoder does not have:
        biases, another activation, scaled rotary positions, quantized weights.
    """
    fields = read(folder)
    where = Path(folder, NAME)
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
    where = Path(folder, NAME)
    if not where.exists():
        raise FileNotFoundError(f"llama: no {where}; the folder of a {ARCHITECTURE} has one.")
    fields = json.loads(where.read_text())
    found = fields.get("architectures") or []
    if found != [ARCHITECTURE]:
        raise ValueError(
            f"llama: {where} has the architectures {found}; expected {[ARCHITECTURE]}."
        )
    for name, only in _ONLY.items():
        if (value := fields.get(name, only)) != only and value is not None:
            raise ValueError(f"llama: {where} has {name}={value!r}; the decoder has {only!r}.")
    return fields


def is_tied(fields: dict[str, Any]) -> bool:
    """Whether the model's embedding is its head too."""
    return bool(fields.get("tie_word_embeddings", False))


def _rope_theta(where, fields):
    rope = fields.get("rope_parameters") or {}  # of transformers 5
    scaling = fields.get("rope_scaling") or {}
    for each in (rope, scaling):
        kind = each.get("rope_type", each.get("type", "default"))
        if kind != "default" or each.get("partial_rotary_factor", 1.0) != 1.0:
            name = "rope_parameters" if each is rope else "rope_scaling"
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
            f"llama: {Path(folder, NAME)} and the config that was given differ: there it is "
            f"{told}. Start from llama.config(folder), with dataclasses.replace."
        )


def text(config: Config, dtype: str, more: dict[str, Any]) -> str:
    """The text of `config.json`.

    Raises:
      ValueError: `more` has a field that the config decides.
    """
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
            f"{NAME}, such as max_position_embeddings."
        )
    return json.dumps(fields | free | more, indent=2) + "\n"
