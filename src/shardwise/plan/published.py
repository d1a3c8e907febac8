"""Published decoders, by name or as a `config.json`.

Of Hugging Face's fields, what changes bytes or products is read; what is planned otherwise is told.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardwise.model import Config

_LLAMA3 = "Grattafiori et al., 2024 (arXiv:2407.21783), Table 3; vocabulary of the released weights"
_LLAMA2 = "Touvron et al., 2023 (arXiv:2307.09288); sizes of the released weights"
_MIXTRAL = "Jiang et al., 2024 (arXiv:2401.04088), Table 1; here with a capacity of 1.25"
_SIZES = dict(vocab="vocab_size", embed="hidden_size", layers="num_hidden_layers")
_SIZES |= dict(heads="num_attention_heads", mlp="intermediate_size")
# What the classes of transformers 4.57 take where a file says nothing; else the values of `read`.
_GEMMA = dict(head_dim=256, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh")
_WIDE = dict(rms_norm_eps=1e-5)
_QWEN2_MOE = dict(num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408)
_QWEN3_MOE = dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
_LATENT = dict(kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128)
_LATENT |= dict(v_head_dim=128)
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
    "DeepseekV2ForCausalLM": dict(n_routed_experts=64, n_shared_experts=2, **_LATENT),
    "DeepseekV3ForCausalLM": dict(n_routed_experts=256, n_shared_experts=1, **_LATENT)
    | dict(num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3)
    | dict(scoring_func="sigmoid", topk_method="noaux_tc"),
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
# Fields that change nothing, and those that are read below.
_KNOWN = """architectures model_type torch_dtype dtype transformers_version use_cache _name_or_path
auto_map bos_token_id eos_token_id pad_token_id initializer_range max_position_embeddings
original_max_position_embeddings norm_eps layer_norm_eps pretraining_tp max_window_layers
norm_topk_prob router_aux_loss_coef output_router_logits cache_implementation no_rope_layer_interval
sliding_window_size full_attn_mod interpolate_factor
num_key_value_heads head_dim tie_word_embeddings hidden_act hidden_activation sliding_window
use_sliding_window sliding_window_pattern _sliding_window_pattern layer_types num_local_experts
num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size
rope_theta rope_parameters rms_norm_eps rope_interleave seq_aux aux_loss_alpha ep_size scoring_func
topk_method n_routed_experts n_shared_experts first_k_dense_replace num_nextn_predict_layers
kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim""".split()
# Fields that change no size and no product, but what is computed.
_OTHERWISE = """rope_scaling rope_local_base_freq partial_rotary_factor no_rope_layers
attention_dropout embd_pdrop resid_pdrop router_jitter_noise query_pre_attn_scalar
attention_multiplier embedding_multiplier residual_multiplier logits_scaling attn_logit_softcapping
final_logit_softcapping routed_scaling_factor n_group topk_group""".split()
# The value with which a field changes nothing; of all others that is 0, false or null.
_NEUTRAL = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1)
_NEUTRAL |= dict(partial_rotary_factor=1, decoder_sparse_step=1, moe_layer_freq=1)
_NEUTRAL |= dict(routed_scaling_factor=1, n_group=1, topk_group=1)


class Published(NamedTuple):
    """A decoder that is held in float32 and used in bfloat16, the source of its sizes, how many
    parameters it has `more` than published, and `notes` on what is planned otherwise.
    """

    config: Config
    source: str
    more: int = 0
    notes: tuple[str, ...] = ()


def _preset(source, **sizes):
    held = dict(head_dim=128, dtype=jnp.bfloat16, param_dtype=jnp.float32, norm_epsilon=1e-5)
    return Published(Config(**held | sizes), source)


_8B = dict(vocab=128_256, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14_336, rope_theta=5e5)
_70B = _8B | dict(embed=8192, layers=80, heads=64, mlp=28_672)
_405B = _8B | dict(embed=16_384, layers=126, heads=128, mlp=53_248)
_2 = dict(vocab=32_000, rope_theta=1e4)
_MIXED = dict(experts=8, experts_per_token=2, capacity_factor=1.25, vocab=32_000, rope_theta=1e6)

PRESETS: dict[str, Published] = {
    "llama3-8b": _preset(_LLAMA3, **_8B),
    "llama3-70b": _preset(_LLAMA3, **_70B),
    "llama3-405b": _preset(_LLAMA3, **_405B),
    "llama2-7b": _preset(_LLAMA2, **_8B | _2 | dict(kv_heads=32, mlp=11_008)),
    "llama2-70b": _preset(_LLAMA2, **_70B | _2),
    "mixtral-8x7b": _preset(_MIXTRAL, **_8B | _MIXED),
}


def preset(model: str) -> Config:
    """The `model.Config` of a published decoder, held in float32 and used in bfloat16.

    `model` is the path of a `config.json`, or of its folder, or a name: "llama3-8b", "llama3-70b",
    "llama3-405b", "llama2-7b", "llama2-70b" or "mixtral-8x7b".

    Raises:
      ValueError: no such name or file; an architecture that is not known, a size that is missing,
        or a value that changes parameters or products and is not computed here, by its name.
    """
    return read(model).config


def read(model: str | Path) -> Published:
    """The `Published` decoder that `preset` gives the sizes of; it raises what that raises."""
    if model in PRESETS:
        return PRESETS[model]
    path = Path(model, "config.json") if Path(model).is_dir() else Path(model)
    if not path.is_file():
        raise ValueError(
            f"plan: model {str(model)!r}: there is no file {path}; give a config.json, its folder, "
            f"or a name: known are {', '.join(PRESETS)}."
        )
    try:
        fields = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"plan: {path} is no JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise ValueError(f"plan: {path} is no config.json: expected an object of fields.")
    return of(fields, str(path))


def of(fields: dict[str, Any], where: str = "config.json") -> Published:
    """The `Published` decoder of a `config.json`'s fields; errors name `where` they stand."""
    name, notes = (fields.get("architectures") or ["none"])[0], []
    if name == "Gemma3ForConditionalGeneration" and "text_config" in fields:
        tied = {k: x for k, x in fields.items() if k == "tie_word_embeddings"}
        name, fields = "Gemma3ForCausalLM", fields["text_config"] | tied
        notes.append("what sees images is left out")
    if name not in ABSENT:
        known = ", ".join(ABSENT)
        raise ValueError(f"plan: {where} has the architecture {name}; known are {known}.")
    given = ABSENT[name] | fields
    for key in sorted(fields.keys() - {*_KNOWN, *_OTHERWISE, *_SIZES.values()}):
        if (value := fields[key]) and value != _NEUTRAL.get(key):
            raise ValueError(
                f"plan: {where} has {key}={value!r}, and it is not known here whether that changes "
                f"parameters or products of {name}. Take it out of the file if it does not."
            )
    if missing := [key for key in _SIZES.values() if not given.get(key)]:
        raise ValueError(f"plan: {where} lacks {', '.join(missing)}; a {name} has them.")
    activation = given.get("hidden_activation") or given.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(f"plan: {where} has the activation {activation!r}; known are {known}.")
    sizes = {ours: given[theirs] for ours, theirs in _SIZES.items()}
    config = Config(
        **sizes | _experts(name, given, where) | _attention(name, given, sizes, where),
        tied=bool(given.get("tie_word_embeddings")),
        activation=_ACTIVATIONS[activation],
        rope_theta=float((given.get("rope_parameters") or given).get("rope_theta") or 10_000.0),
        norm_epsilon=given.get("rms_norm_eps") or 1e-6,
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        **_COMPUTED.get(name, {}),
    )
    # Norms have scales here, which OLMo's have not; a shared expert has no gate.
    more = (2 * config.layers + 1) * config.embed if name == "OlmoForCausalLM" else 0
    more -= config.layers * config.embed if name == "Qwen2MoeForCausalLM" else 0
    return Published(config, where, more, (*notes, *_notes(name, given, config, more)))


def _attention(name, given, sizes, where):
    if not name.startswith("Deepseek"):
        kv_heads = given.get("num_key_value_heads") or sizes["heads"]
        head_dim = given.get("head_dim") or sizes["embed"] // sizes["heads"]
        return dict(kv_heads=kv_heads, head_dim=head_dim)
    if missing := [key for key in _LATENT if not given[key] and key != "q_lora_rank"]:
        raise ValueError(f"plan: {where} lacks {', '.join(missing)}; a {name} has them.")
    turned, plain = given["qk_rope_head_dim"], given["qk_nope_head_dim"]
    widths = dict(latent=given["kv_lora_rank"], query_latent=given["q_lora_rank"] or 0)
    widths |= dict(rope_dim=turned, value_dim=given["v_head_dim"])
    return widths | dict(kv_heads=sizes["heads"], head_dim=plain + turned)


def _experts(name, given, where):
    names = "num_local_experts", "num_experts", "n_routed_experts"
    count = next(filter(None, map(given.get, names)), 0)
    if not count or not any(x in name for x in ("Moe", "Mixtral", "Deepseek")):
        return {}
    if not given.get("num_experts_per_tok"):
        raise ValueError(f"plan: {where} lacks num_experts_per_tok; a {name} has it.")
    mlp = given.get("moe_intermediate_size") or given["intermediate_size"]
    wide = given.get("shared_expert_intermediate_size") or 0
    wide += mlp * (given.get("n_shared_experts") or 0)
    if wide % mlp:
        raise ValueError(
            f"plan: {where} has shared_expert_intermediate_size={wide}, which has to be a "
            f"multiple of moe_intermediate_size={mlp}."
        )
    found = dict(experts=count, experts_per_token=given["num_experts_per_tok"], mlp=mlp)
    dense, score = given.get("first_k_dense_replace") or 0, given.get("scoring_func") or "softmax"
    if dense >= given["num_hidden_layers"]:
        return {}
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"plan: {where} has scoring_func={score!r}; known are softmax, sigmoid.")
    found |= dict(dense_layers=dense, dense_mlp=given["intermediate_size"]) if dense else {}
    found |= dict(router=score, router_bias=given.get("topk_method") == "noaux_tc")
    return found | dict(shared_experts=wide // mlp, capacity_factor=1.25)


def _notes(name, given, config, more):
    if config.experts:
        yield "experts have slots for 1.25 times an even share of the tokens"
    if name == "Qwen2MoeForCausalLM":
        yield "the shared expert has no gate"
    if config.experts and given.get("norm_topk_prob") is False:
        yield "the weights of a token's experts are divided by their sum"
    if given.get("num_nextn_predict_layers"):
        yield "layers that predict further tokens are left out"
    off = name.startswith(("Qwen", "SmolLM")) and not given.get("use_sliding_window")
    if (window := given.get("sliding_window")) and not off:
        every = "some layers" if name.startswith("Gemma") else "layers"
        yield f"{every} see {window:,} tokens back; of longer rows more is counted here"
    if otherwise := [k for k in _OTHERWISE if given.get(k) and given[k] != _NEUTRAL.get(k)]:
        yield f"not computed, and without part in sizes or products: {', '.join(otherwise)}"
    if more:
        yield f"{abs(more):,} parameters {'more' if more > 0 else 'fewer'} than the published model"
