"""Published decoders by their config.json: parameters to the last one, and what is not read."""

import json
import pathlib

import jax.numpy as jnp
import pytest
from sampling import marked

from shardwise import __main__ as command
from shardwise import mesh
from shardwise.plan import arrays, published

mesh.simulate(8)
# {name: its repository at Hugging Face, its number of parameters as published (as its files or its
# card have it), the fields of its config.json}.
DECODERS = json.loads((pathlib.Path(__file__).parent / "decoders.json").read_text())


def fields(name, **changes):
    return DECODERS[name]["config"] | changes


# One of each architecture.
OF_EACH = {x["config"]["architectures"][0]: name for name, x in DECODERS.items()}


@pytest.mark.parametrize("name", marked(DECODERS, OF_EACH.values()))
def test_a_published_decoder_has_its_number_of_parameters(name):
    read = published.of(fields(name))
    held = sum(array.size for array in arrays.of_decoder(read.config).parameters)
    assert held - read.more == DECODERS[name]["parameters"]
    assert bool(read.more) == any("than the published model" in note for note in read.notes)
    assert (read.config.dtype, read.config.param_dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize(
    "name, theta, epsilon",
    [("Llama 3 8B", 5e5, 1e-5), ("Qwen3 8B", 1e6, 1e-6), ("OLMo 1 7B", 1e4, 1e-5)],
)
def test_positions_and_norms_are_the_published_ones(name, theta, epsilon):
    config = published.of(fields(name)).config
    assert (config.rope_theta, config.norm_epsilon) == (theta, epsilon)


def test_what_a_file_leaves_out_is_what_its_class_takes():
    whole = fields("Qwen1.5-MoE-A2.7B")
    absent = ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts")
    less = {key: x for key, x in whole.items() if key not in absent}
    assert published.of(less) == published.of(whole)


def test_every_architecture_is_among_them():
    assert {x["config"]["architectures"][0] for x in DECODERS.values()} == published.ABSENT.keys()


def test_an_architecture_that_is_not_known_is_an_error():
    changes = dict(architectures=["DeepseekV32ForCausalLM"])
    with pytest.raises(ValueError, match=r"DeepseekV32ForCausalLM; known are LlamaForCausalLM"):
        published.of(fields("DeepSeek-V3", **changes))


@pytest.mark.parametrize(
    "changes, told",
    [
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(mlp_bias=True), "mlp_bias=True"),
        (dict(num_mtp_heads=2), "num_mtp_heads=2, and it is not known here"),
        (dict(hidden_act="relu2"), "activation 'relu2'"),
        (dict(hidden_size=None), "lacks hidden_size"),
        (dict(quantization_config={"bits": 4}), "quantization_config="),
    ],
    ids=str,
)
def test_what_changes_parameters_or_products_is_never_passed_over(changes, told):
    with pytest.raises(ValueError, match=told):
        published.of(fields("Llama 3.1 8B", **changes))


@pytest.mark.parametrize(
    "name, changes, told",
    [
        ("Mistral 7B v0.1", {}, "4,096 tokens back"),
        ("Mistral 7B v0.3", {}, None),
        ("Qwen3 8B", {}, None),
        ("Qwen3 8B", dict(use_sliding_window=True, sliding_window=512), "512 tokens back"),
        ("Gemma 2 9B", {}, "attn_logit_softcapping, final_logit_softcapping"),
        ("Llama 3.1 8B", {}, "products: rope_scaling"),
        ("Qwen1.5-MoE-A2.7B", {}, "the shared expert has no gate"),
        ("DeepSeek-V3", {}, "layers that predict further tokens are left out"),
        ("DeepSeek-V2", {}, "products: routed_scaling_factor, n_group, topk_group"),
    ],
)
def test_what_is_planned_otherwise_is_told(name, changes, told):
    notes = published.of(fields(name, **changes)).notes
    assert any(told in note for note in notes) if told else notes == ()


@pytest.mark.parametrize(
    "name, changes",
    [
        ("Qwen3-30B-A3B", dict(decoder_sparse_step=2)),
        ("Qwen3-30B-A3B", dict(mlp_only_layers=[0])),
        ("DeepSeek-V3", dict(moe_layer_freq=2)),
        ("DeepSeek-V3", dict(quantization_config={"quant_method": "fp8"})),
        ("DeepSeek-V2", dict(num_experts_per_tok=None)),
    ],
    ids=str,
)
def test_what_a_mixture_has_and_is_not_known_here_is_an_error(name, changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        published.of(fields(name, **changes))


def test_the_text_of_a_model_of_images_is_read():
    text = fields("Gemma 3 4B text")
    del text["architectures"]
    whole = dict(architectures=["Gemma3ForConditionalGeneration"], text_config=text)
    ours, theirs = published.of(whole), published.of(fields("Gemma 3 4B text"))
    assert ours.config == theirs.config and ours.notes[0] == "what sees images is left out"


def test_the_command_takes_a_file_or_its_folder(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields("Gemma 2 2B")))
    given = ["--chips", "v5e:4x4", "--batch", "16", "--sequence", "4096", "--top", "1"]
    for model in (path, tmp_path):
        assert command.main(["plan", "--model", str(model), *given]) == 0
        out = capsys.readouterr().out
        assert f"Of {model}: not computed, and without part in sizes or products: query" in out
        assert "--model.tied" in out and "--model.norms both" in out
    path.write_text("{")
    assert command.main(["plan", "--model", str(path), *given]) == 1
    assert "is no JSON" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert command.main(["plan", "--model", str(tmp_path / "empty"), *given]) == 1
    assert "there is no file" in (said := capsys.readouterr().err) and "empty/config.json" in said
