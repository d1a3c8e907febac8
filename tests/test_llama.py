import dataclasses
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file
from sampling import marked

from shardwise import llama, mesh, model, processes, rules, tree

SMALL = model.Config(vocab=24, embed=16, layers=4, heads=8, kv_heads=2, head_dim=4, mlp=40)
RULES = {
    "fsdp": rules.FSDPRule("a", min_size=0, uneven="replicate"),
    "heads": rules.PathRules(
        ("blocks/q/kernel", P(None, None, "a")), ("blocks/o/kernel", P(None, "a")), strict=False
    ),
    "head_dim": rules.PathRules(("blocks/o/kernel", P(None, "b", "a")), strict=False),
    "layers": rules.PathRules(("blocks/", P("a")), strict=False),
    "replicated": P(),
}


def weights(config, seed=0):
    """A decoder's state, all of it random, norms too."""
    state = nnx.state(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))
    draw = np.random.default_rng(seed)

    def random(x):
        return jnp.asarray(draw.normal(size=x.shape) * 0.3 + (x.ndim < 3), x.dtype)

    return jax.tree.map(random, state)


def bits(params):
    return [(p, x.shape, x.dtype.name, np.asarray(x).tobytes()) for p, x in tree.leaves(params)]


def size(params):
    return sum(x.nbytes for x in jax.tree.leaves(params))


def logits(config, params, tokens):
    graphdef = nnx.split(nnx.eval_shape(lambda: model.Decoder(config, nnx.Rngs(0))))[0]
    return np.asarray(jax.jit(lambda p: nnx.merge(graphdef, p)(tokens))(params))


def llama_forward(folder, tokens):
    """Logits of what lies in `folder`, by the published equations: Touvron et al., 2023, Su et al.,
    2021 (rotary), Ainslie et al., 2023 (grouped queries), Shazeer, 2020 (SwiGLU). In float64, by
    the files' own names."""
    fields = json.loads((folder / "config.json").read_text())
    w = {}
    for path in folder.glob("*.safetensors"):
        w |= {name: x.astype(np.float64) for name, x in load_file(path).items()}
    heads, groups = fields["num_attention_heads"], fields["num_key_value_heads"]
    size, length = fields["head_dim"], tokens.shape[1]

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + fields["rms_norm_eps"]) * w[name]

    turn = np.arange(length)[:, None] * fields["rope_theta"] ** (-np.arange(0, size, 2) / size)
    turn = np.exp(1j * turn)[None, :, None]  # a rotation of pairs, as a complex number

    def rotated(x):
        pairs = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * turn
        return np.concatenate([pairs.real, pairs.imag], -1)

    def attention(x, at):
        project = lambda name: x @ w[f"{at}.{name}_proj.weight"].T  # noqa: E731
        q, k, v = (project(n).reshape(*tokens.shape, -1, size) for n in "qkv")
        q, k = rotated(q), rotated(k)
        out = np.empty_like(q)
        for head in range(heads):
            group = head * groups // heads
            scores = q[:, :, head] @ k[:, :, group].transpose(0, 2, 1) / np.sqrt(size)
            scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, :, head] = scores / scores.sum(-1, keepdims=True) @ v[:, :, group]
        return out.reshape(*tokens.shape, -1) @ w[f"{at}.o_proj.weight"].T

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(fields["num_hidden_layers"]):
        at = f"model.layers.{i}"
        x = x + attention(norm(x, f"{at}.input_layernorm.weight"), f"{at}.self_attn")
        y = norm(x, f"{at}.post_attention_layernorm.weight")
        gate = y @ w[f"{at}.mlp.gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (y @ w[f"{at}.mlp.up_proj.weight"].T)
        x = x + inner @ w[f"{at}.mlp.down_proj.weight"].T
    head = "model.embed_tokens" if fields["tie_word_embeddings"] else "lm_head"
    return norm(x, "model.norm.weight") @ w[f"{head}.weight"].T


@pytest.mark.parametrize("seed", marked(range(4), [1]))
def test_logits_equal_an_independent_forward_of_the_files(tmp_path, seed):
    draw = np.random.default_rng(seed)

    def n(least, most):
        return int(draw.integers(least, most + 1))

    kv_heads = n(1, 3)
    config = model.Config(
        vocab=n(2, 30), embed=n(2, 20), layers=n(1, 3), heads=kv_heads * n(1, 3),
        kv_heads=kv_heads, head_dim=2 * n(2, 4), mlp=n(1, 20),
        rope_theta=10 ** draw.uniform(1, 6), norm_epsilon=draw.uniform(),
    )  # fmt: skip
    params = weights(config, seed)
    llama.save(tmp_path, params, config, shard_bytes=n(1, 20_000))
    tokens = draw.integers(0, config.vocab, (2, 9))
    found, read = llama.load(tmp_path)
    assert found == config
    ours, theirs = logits(config, read, tokens), llama_forward(tmp_path, tokens)
    # float32 against float64: a few roundings of the largest entries.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


@pytest.fixture(scope="module", params=marked(["float32", "bfloat16"], ["bfloat16"]))
def saved(request, tmp_path_factory):
    """(folder, config, params), saved from eight devices in several files."""
    dtype = jnp.dtype(request.param)
    config = dataclasses.replace(SMALL, dtype=dtype, param_dtype=dtype)
    folder, params = tmp_path_factory.mktemp(request.param) / "new", weights(config)
    grid = mesh.make(a=8)
    llama.save(folder, rules.place(params, RULES["fsdp"], grid), config, shard_bytes=6000)
    return folder, config, params


@pytest.mark.parametrize("rule", [None, *RULES])
def test_a_round_trip_is_bitwise_on_any_mesh(saved, rule):
    folder, config, params = saved
    grid = mesh.make(a=4, b=2)
    given = {} if rule is None else dict(rule=RULES[rule], mesh=grid)
    found, read = llama.load(folder, **given)
    assert found == config and bits(read) == bits(params)
    if rule is not None:
        placed = jax.tree.leaves(rules.shardings(RULES[rule], params, grid))
        for (path, x), sharding in zip(tree.leaves(read), placed, strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim), path
    # What is read is a decoder's state: names of axes and all.
    assert jax.tree.structure(read) == jax.tree.structure(params)


def test_files_are_as_large_as_asked_and_the_index_names_all(saved):
    folder, config, params = saved
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    ]
    total = 0
    for file in files:
        with safetensors.safe_open(file, "np") as opened:
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}
        assert all(index["weight_map"][name] == file.name for name in arrays)
        assert sum(x.nbytes for x in arrays.values()) <= 6000 or len(arrays) == 1
        total += sum(x.nbytes for x in arrays.values())
    assert len(index["weight_map"]) == 3 + 9 * config.layers
    assert index["metadata"]["total_size"] == total == size(params)


class Counted:
    """A file of which every slice that is taken is weighed."""

    taken = 0

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def keys(self):
        return self.file.keys()

    def get_slice(self, name):
        return CountedSlice(self.file.get_slice(name))


class CountedSlice:
    def __init__(self, array):
        self.array, self.get_shape, self.get_dtype = array, array.get_shape, array.get_dtype

    def __getitem__(self, index):
        part = self.array[index]
        Counted.taken += part.nbytes
        return part


@pytest.mark.parametrize("rule", [None, *RULES])
def test_a_process_reads_each_entry_once(saved, rule, monkeypatch):
    folder, _, params = saved
    opened = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda *a, **k: Counted(opened(*a, **k)))
    monkeypatch.setattr(Counted, "taken", 0)
    llama.load(folder, **({} if rule is None else dict(rule=RULES[rule], mesh=mesh.make(a=4, b=2))))
    assert Counted.taken == size(params)


def test_config_that_is_given_says_how_it_runs(saved):
    folder, config, params = saved
    asked = dataclasses.replace(
        config, remat=True, stages=2, dropout=0.1, dtype=jnp.float32, param_dtype=jnp.float32
    )
    found, read = llama.load(folder, asked)
    assert found == asked
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    assert bits(read) == bits(wide)


def test_tied_embeddings_are_the_head_too(tmp_path):
    llama.save(tmp_path, weights(SMALL), SMALL, fields={"max_position_embeddings": 64})
    path = next(tmp_path.glob("*.safetensors"))
    arrays = load_file(path)
    (tmp_path / "model.safetensors.index.json").unlink()
    edited(tmp_path, tie_word_embeddings=True)
    tokens = np.arange(12).reshape(2, 6)
    for keep in (True, False):  # some writers store the head, which then means nothing
        path.unlink()
        path = tmp_path / "model.safetensors"
        save_file({n: x for n, x in arrays.items() if keep or n != "lm_head.weight"}, path)
        config, read = llama.load(tmp_path)
        theirs = llama_forward(tmp_path, tokens)
        np.testing.assert_allclose(
            logits(config, read, tokens), theirs, rtol=0, atol=2e-5 * np.abs(theirs).max()
        )


def test_older_files_hold_frequencies_that_follow_from_the_config(single):
    folder, arrays = single
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    save_file(arrays | frequencies, folder / "model.safetensors")
    assert bits(llama.load(folder)[1]) == bits(weights(SMALL))


@pytest.fixture
def single(tmp_path):
    """(folder, arrays) of one file, without an index."""
    llama.save(tmp_path, weights(SMALL), SMALL)
    path = next(tmp_path.glob("*.safetensors"))
    arrays = load_file(path)
    (tmp_path / "model.safetensors.index.json").unlink()
    path.rename(tmp_path / "model.safetensors")
    return tmp_path, arrays


def edited(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, r"\['MistralForCausalLM'\]; expected \['Llama"),
        ({"architectures": None}, r"architectures \[\]"),
        ({"attention_bias": True}, "attention_bias=True; the decoder has False"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; the decoder has 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling=.*llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling=.*linear"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters=.*yarn"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "turns all of head_dim"),
        ({"torch_dtype": "float64"}, "dtype 'float64'; expected float32, bfloat16, float16"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
        ({"hidden_size": 18}, r"embed_tokens.weight is \[24, 16\], expected \[24, 18\]"),
        ({"num_hidden_layers": 5}, r"layers.4.input_layernorm.weight is missing, expected \[16\]"),
        ({"num_hidden_layers": 3}, r"layers.3.input_layernorm.weight is \[16\], expected nothing"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(single, fields, message):
    edited(single[0], **fields)
    with pytest.raises(ValueError, match=message):
        llama.load(single[0])


def test_what_a_config_leaves_out_has_the_published_meaning(single):
    folder, _ = single
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    for name in ("rope_theta", "rope_parameters", "rms_norm_eps", "num_key_value_heads"):
        del fields[name]
    path.write_text(json.dumps(fields | {"num_attention_heads": 4, "head_dim": None}))
    config = llama.config(folder)
    assert (config.rope_theta, config.norm_epsilon) == (10_000.0, 1e-6)
    assert (config.kv_heads, config.head_dim) == (4, 4)
    del fields["hidden_size"]
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="lacks hidden_size"):
        llama.config(folder)


def test_names_shapes_and_numbers_of_the_files_are_checked_before_reading(single, monkeypatch):
    folder, arrays = single
    monkeypatch.setattr("shardwise.llama.files._part", lambda *args: pytest.fail("read"))
    path, name = folder / "model.safetensors", "model.layers.1.self_attn.k_proj.weight"
    for change, message in [
        ({name: None}, f"{name} is missing"),
        (
            {"model.layers.0.self_attn.q_proj.bias": np.ones(2)},
            r"q_proj.bias is \[2\], expected nothing",
        ),
        ({name: arrays[name].T.copy()}, rf"{name} is \[16, 8\], expected \[8, 16\]"),
        ({name: arrays[name].astype(np.int8)}, rf"{name} is I8, expected \[8, 16\]"),
    ]:
        save_file({n: x for n, x in (arrays | change).items() if x is not None}, path)
        with pytest.raises(ValueError, match=message):
            llama.load(folder)
    path.unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"There are pytorch_model\.bin"):
        llama.load(folder)
    with pytest.raises(FileNotFoundError, match=r"no .*config\.json"):
        llama.load(folder / "none")


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    llama.save(tmp_path, weights(SMALL), SMALL, shard_bytes=6000)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    places = index["weight_map"]
    for name in ("gone.safetensors", "../elsewhere.safetensors"):
        path.write_text(json.dumps({"weight_map": places | {"model.norm.weight": name}}))
        with pytest.raises(FileNotFoundError, match=rf"no .*{name}\. There are .*index.json names"):
            llama.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 5e5}, r"rope_theta 10000.0, not 500000.0"),
        ({"kv_heads": 4, "mlp": 8}, "kv_heads 2, not 4|mlp 40, not 8"),
        ({"experts": 4}, "Config.experts is 4"),
    ],
)
def test_a_config_of_other_weights_is_refused(single, changes, message):
    with pytest.raises(ValueError, match=message):
        llama.load(single[0], dataclasses.replace(SMALL, **changes))


def test_a_rule_comes_with_a_mesh(single):
    for given in (dict(rule=P()), dict(mesh=mesh.make(a=8))):
        with pytest.raises(ValueError, match="both rule= and mesh="):
            llama.load(single[0], **given)


def test_what_cannot_be_saved_says_why(tmp_path):
    params = weights(SMALL)
    for changes, message in [
        (dict(config=dataclasses.replace(SMALL, mlp=8)), r"gate/kernel is \(4, 16, 40\), expected"),
        (dict(config=dataclasses.replace(SMALL, experts=4)), "Config.experts is 4"),
        (dict(config=dataclasses.replace(SMALL, rope_dim=2)), "Config.rope_dim is 2"),
        (dict(params={"w": np.ones(2)}), "w is .*expected nothing"),
        (dict(shard_bytes=0), "shard_bytes=0"),
        (dict(fields={"hidden_size": 3}), "decides hidden_size"),
    ]:
        given = dict(params=params, config=SMALL) | changes
        with pytest.raises(ValueError, match=message):
            llama.save(tmp_path / "new", **given)
    leaves, structure = jax.tree.flatten(params)
    mixed = jax.tree.unflatten(structure, [leaves[0].astype(jnp.bfloat16), *leaves[1:]])
    with pytest.raises(ValueError, match="parameters of bfloat16, float32"):
        llama.save(tmp_path / "new", mixed, SMALL)
    assert not (tmp_path / "new").exists()
    llama.save(tmp_path / "new", params, SMALL)
    with pytest.raises(FileExistsError, match=r"config.json.* already; choose a new folder"):
        llama.save(tmp_path / "new", params, SMALL)


def test_without_safetensors_the_extra_is_named(single, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'shardwise\[safetensors\]'"):
        llama.load(single[0])


def part_of_two(process, address, tests, source, target):
    """Print the bytes that this process reads and those of all, and how saving twice ends."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(address, 2, process, coordinator_bind_address=address)
    sys.path.insert(0, tests)
    import test_llama

    opened = safetensors.safe_open
    safetensors.safe_open = lambda *a, **k: test_llama.Counted(opened(*a, **k))
    config, params = llama.load(source, rule=rules.FSDPRule("a", min_size=0), mesh=mesh.make(a=8))
    told = [test_llama.Counted.taken, test_llama.size(params)]
    llama.save(target, params, config, shard_bytes=9000)
    for folder in (target, f"{target}-full"):
        try:  # a folder that has a model; then a full disk, which process 0 alone sees
            llama.save(folder, params, config, shard_bytes=9000)
        except (OSError, RuntimeError) as error:
            told.append(type(error).__name__)
        safetensors.numpy.save_file = test_llama.no_space
    print("\ntold", *told)


def no_space(arrays, path, metadata):
    raise OSError(28, "No space left on device", str(path))


@pytest.mark.slow
def test_two_processes_read_half_each_and_save_the_whole(tmp_path):
    config = dataclasses.replace(SMALL, param_dtype=jnp.dtype("bfloat16"), layers=2)
    params = weights(config)
    source, target = tmp_path / "a", tmp_path / "b"
    llama.save(source, params, config)
    tests = os.path.dirname(__file__)
    printed = processes.run(part_of_two, 2, tests, str(source), str(target))
    # Gloo prints too.
    first, second = (
        next(x.split() for x in p.splitlines() if x.startswith("told")) for p in printed
    )
    assert first[1:] == [str(size(params) // 2), str(size(params)), "FileExistsError", "OSError"]
    assert second[1:] == [*first[1:3], "RuntimeError", "RuntimeError"]
    assert not list((tmp_path / "b-full").iterdir())
    assert bits(llama.load(target)[1]) == bits(params)
