"""A published decoder by its `config.json`, in Hugging Face's format.

What changes bytes or products is read; what is planned otherwise is told.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardwise.model import Config

FILE = "config.json"
_SIZES = {
    "vocab": "vocab_size",
    "embed": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp": "intermediate_size",
}
# What the classes of transformers 4.57 take where a file says nothing; else the values of `read`.
_GEMMA = dict(head_dim=256, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh")
_WIDE = dict(rms_norm_eps=1e-5)
_QWEN2_MOE = dict(num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408)
_QWEN3_MOE = dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
ABSENT: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": dict(num_key_value_heads=8, sliding_window=4096),
    "MixtralForCausalLM": dict(num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2)
    | dict(rope_theta=1e6, **_WIDE),
    "Qwen2ForCausalLM": dict(num_key_value_heads=32),
    "Qwen3ForCausalLM": dict(num_key_value_heads=32, head_dim=128),
    "Qwen2MoeForCausalLM": dict(num_key_value_heads=16, shared_expert_intermediate_size=5632)
    | _QWEN2_MOE,
    "Qwen3MoeForCausalLM": dict(num_key_value_heads=4, **_QWEN3_MOE),
    "GemmaForCausalLM": dict(num_key_value_heads=16, **_GEMMA),
    "Gemma2ForCausalLM": dict(num_key_value_heads=4, sliding_window=4096, **_GEMMA)
    | dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    "Gemma3ForCausalLM": dict(num_key_value_heads=4, sliding_window=4096, **_GEMMA)
    | dict(vocab_size=262_208, num_attention_heads=8, rope_theta=1e6),
    "Phi3ForCausalLM": _WIDE,
    "OlmoForCausalLM": _WIDE,
    "Olmo2ForCausalLM": _WIDE,
    "GraniteForCausalLM": {},
    "SmolLM3ForCausalLM": dict(num_key_value_heads=4, tie_word_embeddings=True, rope_theta=2e6),
}
# What our decoder computes of each class.
_COMPUTED: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": dict(qkv_bias=True),
    "Qwen2MoeForCausalLM": dict(qkv_bias=True),
    "Qwen3ForCausalLM": dict(qk_norm="head"),
    "Qwen3MoeForCausalLM": dict(qk_norm="head"),
    "Gemma2ForCausalLM": dict(norms="both"),
    "Gemma3ForCausalLM": dict(norms="both", qk_norm="head"),
    "Olmo2ForCausalLM": dict(norms="after", qk_norm="heads"),
}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu"}
# Fields that have no part in a parameter's size or in a product, nor in what is computed.
_FREE = """architectures model_type torch_dtype dtype transformers_version use_cache _name_or_path
auto_map bos_token_id eos_token_id pad_token_id initializer_range max_position_embeddings
original_max_position_embeddings norm_eps layer_norm_eps pretraining_tp max_window_layers
norm_topk_prob router_aux_loss_coef output_router_logits cache_implementation no_rope_layer_interval
sliding_window_size full_attn_mod interpolate_factor""".split()
# Fields that change what is computed, but no size and no product, unless they are 0 or null; of
# factors, unless they are 1.
_FACTORS = "partial_rotary_factor embedding_multiplier residual_multiplier logits_scaling".split()
_OTHERWISE = """rope_scaling rope_local_base_freq partial_rotary_factor no_rope_layers
attention_dropout embd_pdrop resid_pdrop router_jitter_noise query_pre_attn_scalar
attention_multiplier embedding_multiplier residual_multiplier logits_scaling attn_logit_softcapping
final_logit_softcapping""".split()
# Fields that are read below.
_READ = {
    *_SIZES.values(),
    *"""num_key_value_heads head_dim tie_word_embeddings hidden_act hidden_activation sliding_window
    use_sliding_window sliding_window_pattern _sliding_window_pattern layer_types num_local_experts
    num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size
    rope_theta rope_parameters rms_norm_eps""".split(),
}
# Of fields that would change sizes or products, the one value that is computed.
_ONLY = {"decoder_sparse_step": 1}


class Reading(NamedTuple):
    """The decoder of a `config.json`, held in float32 and used in bfloat16.

    `more` are the parameters that it has beside the published model's, below 0 where it lacks some;
    `notes`, what the file asks for and is planned otherwise.
    """

    config: Config
    more: int
    notes: tuple[str, ...]


def read(path: str | Path) -> Reading:
    """The `Reading` of a `config.json`, or of the folder that has one.

    Raises:
      FileNotFoundError: there is none.
      ValueError: an architecture that is not known, a size that is missing, or a value that changes
        parameters or products and is not computed here, by its name.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"plan: no {path}; the folder of a published decoder has one.")
    try:
        fields = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"plan: {path} is no JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise ValueError(f"plan: {path} is no config.json: expected an object of fields.")
    return of(fields, str(path))


def of(fields: dict[str, Any], where: str = FILE) -> Reading:
    """The `Reading` of the fields of a `config.json`; errors name `where` they stand."""
    name, left_out = (fields.get("architectures") or ["none"])[0], ()
    if name == "Gemma3ForConditionalGeneration" and "text_config" in fields:
        tied = {k: x for k, x in fields.items() if k == "tie_word_embeddings"}
        name, fields = "Gemma3ForCausalLM", fields["text_config"] | tied
        left_out = ("what sees images is left out",)
    if name not in ABSENT:
        raise ValueError(
            f"plan: {where} has the architecture {name}; known are {', '.join(ABSENT)}."
        )
    given = ABSENT[name] | fields
    for key in sorted(fields.keys() - _READ - {*_FREE, *_OTHERWISE}):
        if (value := fields[key]) and value != _ONLY.get(key):
            raise ValueError(
                f"plan: {where} has {key}={value!r}, and it is not known here whether that changes "
                f"parameters or products of {name}. Take it out of the file if it does not."
            )
    if missing := [key for key in _SIZES.values() if not given.get(key)]:
        raise ValueError(f"plan: {where} lacks {', '.join(missing)}; a {name} has them.")
    activation = given.get("hidden_activation") or given.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"plan: {where} has the activation {activation!r}; known are {', '.join(_ACTIVATIONS)}."
        )
    sizes = {ours: given[theirs] for ours, theirs in _SIZES.items()}
    experts, lacking, told = _experts(name, given, where)
    more = (2 * sizes["layers"] + 1) * sizes["embed"] if name == "OlmoForCausalLM" else -lacking
    config = Config(
        **sizes | experts,
        kv_heads=given.get("num_key_value_heads") or sizes["heads"],
        head_dim=given.get("head_dim") or sizes["embed"] // sizes["heads"],
        tied=bool(given.get("tie_word_embeddings")),
        activation=_ACTIVATIONS[activation],
        rope_theta=float((given.get("rope_parameters") or given).get("rope_theta") or 10_000.0),
        norm_epsilon=given.get("rms_norm_eps") or 1e-6,
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        **_COMPUTED.get(name, {}),
    )
    return Reading(config, more, (*left_out, *told, *_notes(name, given, more)))


def _experts(name, given, where):
    """(fields of `Config`, parameters that it lacks, notes) of a mixture."""
    count = given.get("num_local_experts") or given.get("num_experts")
    if not count or ("Moe" not in name and name != "MixtralForCausalLM"):
        return {}, 0, ()
    found = dict(experts=count, experts_per_token=given["num_experts_per_tok"])
    found |= dict(mlp=given.get("moe_intermediate_size") or given["intermediate_size"])
    told, lacking = ["experts have slots for 1.25 times an even share of the tokens"], 0
    if wide := given.get("shared_expert_intermediate_size"):
        if wide % found["mlp"]:
            raise ValueError(
                f"plan: {where} has shared_expert_intermediate_size={wide}, which has to be a "
                f"multiple of moe_intermediate_size={found['mlp']}."
            )
        found |= dict(shared_experts=wide // found["mlp"])
        lacking = given["hidden_size"] * given["num_hidden_layers"]
        told.append("the shared expert has no gate")
    return found | dict(capacity_factor=1.25), lacking, told


def _notes(name, given, more):
    window = given.get("sliding_window")
    if name.startswith(("Qwen", "SmolLM")) and not given.get("use_sliding_window"):
        window = None
    if window:
        every = "some layers" if name.startswith("Gemma") else "layers"
        yield f"{every} see {window:,} tokens back; of longer rows more is counted here"
    changed = (k for k in _OTHERWISE if given.get(k))
    if otherwise := [k for k in changed if k not in _FACTORS or given[k] != 1]:
        yield f"not computed, and without part in sizes or products: {', '.join(otherwise)}"
    if more:
        yield f"{abs(more):,} parameters {'more' if more > 0 else 'fewer'} than the published model"
