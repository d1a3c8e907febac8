import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import fsdp, measure, mesh, model, rules
from shardwise.fsdp.arrays import array_layouts
from shardwise.rules.rule import Choice, Rule

mesh.simulate(8)
CONFIG = model.Config(embed=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=24, vocab=32)
ABSTRACT = nnx.state(nnx.eval_shape(lambda: model.Decoder(CONFIG, nnx.Rngs(0))))
TABLE = {
    "vocab": "model",
    "embed": None,
    "heads": "model",
    "kv_heads": "model",
    "head_dim": None,
    "mlp": "model",
}
TENSOR = rules.LogicalRules(TABLE)
MESH = mesh.make(fsdp=4, model=2)

# What holds for every rule is tested on these; a new rule is one more entry.
RULES = {
    "replicated": P(),
    "logical": TENSOR,
    "two axes": TENSOR | {"mlp": ("fsdp", "model")},
    "fsdp": rules.FSDPRule("fsdp", min_size=64),
    "fsdp, first": rules.FSDPRule("fsdp", min_size=64, pick="first"),
    "fsdp over logical": rules.FSDPRule("fsdp", min_size=64, over=TENSOR),
    "paths": rules.PathRules(("kernel$", P(None, "model")), ("scale$", P())),
    "policy": rules.PolicyRule(lambda path, leaf: P("fsdp") if leaf.shape[0] % 4 == 0 else P()),
}


def specs(rule, tree, m=MESH):
    """{path: spec}, trailing None left out."""
    shaped = rules.shardings(rule, tree, m)
    return {path: sharding.spec for path, sharding in rules.named_leaves(shaped)}


def state_of(tx):
    return jax.eval_shape(tx.init, ABSTRACT)


def test_paths_are_the_same_for_every_kind_of_tree():
    plain = nnx.to_pure_dict(ABSTRACT)
    assert dict(rules.named_leaves(plain)).keys() == dict(rules.named_leaves(ABSTRACT)).keys()
    assert "blocks/q/kernel" in dict(rules.named_leaves(plain))
    adam = [path for path, _ in rules.named_leaves(state_of(optax.adam(1e-3)))]
    assert "0/mu/blocks/q/kernel" in adam and "0/count" in adam
    decoder = nnx.eval_shape(lambda: model.Decoder(CONFIG, nnx.Rngs(0)))
    whole = nnx.eval_shape(lambda: nnx.Optimizer(decoder, optax.adam(1e-3), wrt=nnx.Param))
    paths = [path for path, _ in rules.named_leaves(nnx.state(whole))]
    assert "opt_state/0/mu/blocks/q/kernel" in paths and "step" in paths


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_specs_have_the_structure_of_the_tree_and_fit_it(rule):
    shaped = rules.shardings(rule, ABSTRACT, MESH)
    assert jax.tree.structure(shaped) == jax.tree.structure(ABSTRACT)
    for (_, leaf), sharding in zip(
        rules.named_leaves(ABSTRACT), jax.tree.leaves(shaped), strict=True
    ):
        sharding.shard_shape(leaf.shape)  # raises where it does not divide


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_description_counts_what_then_lies_on_the_devices(rule):
    tree = jax.tree.map(lambda x: np.arange(x.size, dtype=x.dtype).reshape(x.shape), ABSTRACT)
    placed = rules.place(tree, rule, MESH)
    described = rules.describe(rule, ABSTRACT, MESH)
    assert set(measure.bytes_on_devices(placed).values()) == {described.bytes_per_device}
    assert described.whole_bytes == sum(x.nbytes for x in jax.tree.leaves(tree))
    whole = {path for path, x in rules.named_leaves(placed) if x.sharding.is_fully_replicated}
    assert whole == set(described.replicated) and all(described.replicated.values())
    gathered = rules.whole(placed)
    for a, b in zip(jax.tree.leaves(gathered), jax.tree.leaves(tree), strict=True):
        assert a.sharding.is_fully_replicated
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("tx", [optax.adam(1e-3), optax.adafactor(1e-3, min_dim_size_to_factor=8)])
def test_optimizer_states_follow_their_parameters(rule, tx):
    params, followed = specs(rule, ABSTRACT), rules.follow(rule, ABSTRACT)
    shapes = {path: leaf.shape for path, leaf in rules.named_leaves(ABSTRACT)}
    found = 0
    state = state_of(tx)
    for (path, leaf), spec in zip(
        rules.named_leaves(state), specs(followed, state).values(), strict=True
    ):
        owner = next((p for p in params if path.endswith("/" + p)), None)
        if leaf.size == 1 or owner is None:
            assert spec == P()
            continue
        full = list(params[owner]) + [None] * (len(shapes[owner]) - len(params[owner]))
        if leaf.shape != shapes[owner]:  # factored: by its definition, along the largest axes
            order = np.argsort(shapes[owner], stable=True)
            del full[order[-1] if "v_row" in path else order[-2]]
        want = NamedSharding(MESH, P(*full))
        assert NamedSharding(MESH, spec).is_equivalent_to(want, len(leaf.shape)), path
        found += 1
    assert found >= len(params)


def test_a_square_matrix_tells_its_factored_moments_apart():
    square = {"w": np.arange(24.0 * 24, dtype=np.float32).reshape(24, 24) ** 2}
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    _, state = jax.jit(lambda x: tx.update(x, tx.init(x), x))(square)
    rows = np.asarray(square["w"] ** 2).mean(axis=1)  # keeps axis 0
    np.testing.assert_allclose(state[0].v_row["w"] / state[0].v_row["w"][0], rows / rows[0], 1e-4)
    found = specs(rules.follow(P("model", "fsdp"), square), state)
    assert found["0/v_row/w"] == P("model") and found["0/v_col/w"] == P("fsdp")


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5),
    size=st.sampled_from([1, 2, 4, 8]),
    pick=st.sampled_from(["first", "largest"]),
    stacked=st.booleans(),
)
@settings(max_examples=60)
def test_fsdp_cuts_the_largest_or_the_first_axis_that_divides(shapes, size, pick, stacked):
    tree = [jax.ShapeDtypeStruct(tuple(shape), jnp.float32) for shape in shapes]
    rule = rules.FSDPRule(
        "fsdp", min_size=8, pick=pick, stacked=lambda path: stacked, uneven="replicate"
    )
    for leaf, spec in zip(tree, rule(tree, mesh.make(fsdp=size)), strict=True):
        axes = range(1 if stacked else 0, leaf.ndim)
        fits = [i for i in axes if leaf.shape[i] % size == 0]
        if leaf.size < 8 or not fits:
            assert spec == P()
            continue
        cut = list(spec).index("fsdp")
        assert len(spec) == cut + 1 and cut in fits
        longest = [i for i in fits if leaf.shape[i] == max(leaf.shape[j] for j in fits)]
        assert cut == (fits[0] if pick == "first" else longest[-1])


def test_a_rule_over_another_goes_by_the_other_s_names():
    params = {"w": jnp.zeros((64, 8))}
    low, high = (
        rules.LogicalRules({"a": "model", "b": None}, names={"w": names})
        for names in (("a", "b"), ("b", "a"))
    )
    rule = rules.FSDPRule("fsdp", min_size=1, over=low)
    grid = mesh.make(fsdp=4, model=2)
    assert rule(params, grid) == {"w": P("model", "fsdp")}
    assert dataclasses.replace(rule, over=high)(params, grid) == {"w": P("fsdp", "model")}


def test_of_equal_axes_the_last_is_cut_unless_told_otherwise():
    tree = {"w": jnp.zeros((256, 256))}
    assert specs(rules.FSDPRule("fsdp"), tree) == {"w": P(None, "fsdp")}
    assert specs(rules.FSDPRule("fsdp", pick="first"), tree) == {"w": P("fsdp")}


def test_an_array_of_min_size_is_cut_and_of_an_element_fewer_is_not():
    tree = {"w": jnp.zeros((8, 8))}
    assert specs(rules.FSDPRule("fsdp", min_size=64), tree) == {"w": P(None, "fsdp")}
    assert specs(rules.FSDPRule("fsdp", min_size=65), tree) == {"w": P()}


def test_what_may_be_layers_is_not_cut_unless_somebody_says_so():
    plain = {"w": jnp.zeros((64, 32, 8)), "v": jnp.zeros((64, 8))}
    found = specs(rules.FSDPRule("fsdp", min_size=1), plain)
    assert found == {"w": P(None, "fsdp"), "v": P("fsdp")}
    said = rules.FSDPRule("fsdp", min_size=1, stacked=lambda path: False)
    assert specs(said, plain)["w"] == P("fsdp")
    only = {"w": jnp.zeros((64, 3, 3))}
    assert specs(said, only) == {"w": P("fsdp")}
    with pytest.raises(
        ValueError, match=r"w of shape \(64, 3, 3\) has no .*axis may be one of lay"
    ):
        specs(rules.FSDPRule("fsdp", min_size=1), only)


def test_layers_are_never_cut_unless_the_table_says_so():
    tall = model.Config(embed=8, layers=32, heads=2, kv_heads=2, head_dim=4, mlp=8)
    params = nnx.state(nnx.eval_shape(lambda: model.Decoder(tall, nnx.Rngs(0))))
    for path, spec in specs(rules.FSDPRule("fsdp", min_size=1), params).items():
        assert not path.startswith("blocks/") or spec[0] is None, path
    cut = rules.LogicalRules({**TABLE, "layers": "fsdp"})
    assert specs(cut, params)["blocks/up/kernel"] == P("fsdp", None, "model")


def test_fsdp_over_logical_rules_takes_what_they_leave():
    found = specs(RULES["fsdp over logical"], ABSTRACT)
    assert found["blocks/up/kernel"] == P(None, "fsdp", "model")
    assert found["blocks/down/kernel"] == P(None, "model", "fsdp")
    already = rules.FSDPRule("fsdp", min_size=64, over=TENSOR | {"mlp": "fsdp"})
    assert specs(already, ABSTRACT)["blocks/up/kernel"] == P(None, None, "fsdp")


STAGED = [
    # (names, shape, the spec that another rule gives over stages, with fsdp)
    (("layers", "embed", "mlp"), (5, 16, 3), P(None, "stage"), P(None, ("fsdp", "stage"))),
    (("layers", "embed", "mlp"), (5, 16, 4), P(None, "stage"), P(None, "stage", "fsdp")),
    (("layers", "embed"), (8, 3), P("stage"), P("stage")),
    (("embed", "mlp"), (16, 3), P("stage"), P(("fsdp", "stage"))),
    (None, (16, 3), P("stage"), P("stage")),
    (None, (3, 16), P(None, "stage"), P(None, ("fsdp", "stage"))),
]


@pytest.mark.parametrize("names, shape, below, expected", STAGED)
def test_fsdp_shares_an_axis_with_stages_where_no_other_divides(names, shape, below, expected):
    """But not an axis of rows: of layers, or, of an array without names, the first."""
    grid, tree = mesh.make(stage=4, fsdp=2), {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    told = dict(min_size=1, names={"w": names} if names else None, uneven="replicate")
    rule = rules.FSDPRule("fsdp", over=below, beside=("stage",), **told)
    assert rule(tree, grid) == {"w": expected}


def test_names_for_plain_trees():
    params = nnx.to_pure_dict(ABSTRACT)
    tree = {k: params[k] for k in ("embed", "head")}
    names = {"embed": {"kernel": ("vocab", "embed")}, "head": {"kernel": ("embed", None)}}
    rule = rules.LogicalRules(TABLE, names=names)
    assert specs(rule, tree) == {"embed/kernel": P("model"), "head/kernel": P()}
    adam = specs(rule, jax.eval_shape(optax.adam(1e-3).init, tree))
    assert adam["0/mu/embed/kernel"] == P("model") and adam["0/count"] == P()
    stacked = {"w": jnp.zeros((3, 16, 24))}
    rule = rules.LogicalRules(TABLE, names={"w": ("embed", "mlp")})
    assert specs(rule, stacked) == {"w": P(None, None, "model")}


def test_a_trees_own_names_reach_fsdp_over_them():
    tree = {"w": jnp.zeros((8, 16, 24))}
    logical = rules.LogicalRules(TABLE, names={"w": ("embed", "mlp")})
    found = specs(rules.FSDPRule("fsdp", min_size=1, over=logical), tree)
    assert found == {"w": P(None, "fsdp", "model")}  # and not along the 8 layers


@pytest.mark.parametrize("shape", [(8, 3, 5), (7, 3, 5), (7, 15)])
def test_what_fsdp_advises_does_what_it_says(shape):
    tree, grid = [jax.ShapeDtypeStruct(shape, jnp.float32)], mesh.make(fsdp=8)
    with pytest.raises(ValueError, match="pass uneven='replicate' to") as error:
        rules.FSDPRule("fsdp", min_size=1)(tree, grid)
    [spec] = rules.FSDPRule("fsdp", min_size=1, uneven="replicate")(tree, grid)
    assert ("to cut its first axis." in str(error.value)) == (spec == P("fsdp"))
    assert ("to leave it as it is." in str(error.value)) == (spec == P())


def test_names_that_models_carry_already():
    """Those of nnx.with_partitioning, alone and stacked, and of Linen's boxes."""
    getattr(nnx, "use_eager_sharding", lambda _: None)(False)
    init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(8, 16, use_bias=False, kernel_init=init, rngs=rngs)

    def stacked(named):
        how = {"transform_metadata": {nnx.PARTITION_NAME: "layers"}} if named else {}
        make = nnx.vmap(lambda key: Layer(nnx.Rngs(params=key)), **how)
        return nnx.state(nnx.eval_shape(lambda: make(jax.random.split(jax.random.key(0), 4))))

    one = nnx.state(nnx.eval_shape(lambda: Layer(nnx.Rngs(0))))
    assert specs(TENSOR, one) == {"dense/kernel": P(None, "model")}
    boxed = linen.with_partitioning(linen.initializers.ones, ("embed", "mlp"))
    dense = linen.Dense(16, use_bias=False, kernel_init=boxed)
    found = jax.eval_shape(dense.init, jax.random.key(0), jnp.ones((1, 8)))
    assert specs(TENSOR, found) == {"params/kernel": P(None, "model")}
    for named in True, False:
        tree = stacked(named)
        assert specs(TENSOR, tree) == {"dense/kernel": P(None, None, "model")}
        cut = specs(rules.FSDPRule("fsdp", min_size=1), tree)
        assert cut == {"dense/kernel": P(None, None, "fsdp")}
        arrays = jax.tree.map(lambda x: jnp.ones(x.shape), tree)
        [found] = array_layouts(arrays, fsdp.rule(), mesh.make(fsdp=8))
        assert found.stacked and found.cut > 0
    [plain] = array_layouts({"w": jnp.ones((8, 8, 8))}, fsdp.rule(), mesh.make(fsdp=8))
    assert not plain.stacked and plain.cut == 1


def test_activation_specs_by_logical_axes():
    table = rules.LogicalRules({"batch": ("data", "fsdp"), "embed": None, "mlp": "model"})
    assert table.spec("batch", None, "mlp") == P(("data", "fsdp"), None, "model")
    with pytest.raises(ValueError, match=r"no rule for 'sequence'.*There are rules for"):
        table.spec("batch", "sequence")


ARRAY = {"w": jnp.zeros((6, 24))}
NAMED = {"w": ("embed", "mlp")}
MISTAKES = {
    "unknown name": (
        rules.LogicalRules({"embed": None}, names=NAMED),
        r"w has the logical axes \('embed', 'mlp'\), and there is no rule for 'mlp'; add",
    ),
    "collision": (
        rules.LogicalRules({"embed": "model", "mlp": "model"}, names=NAMED),
        "in w the logical axes 'embed' and 'mlp' are both on mesh axis 'model'.*Give one",
    ),
    "missing mesh axis": (
        rules.LogicalRules({"embed": None, "mlp": "tensor"}, names=NAMED),
        "the mesh has no axis 'tensor'; it has fsdp=4, model=2. Make the mesh",
    ),
    "uneven": (
        rules.LogicalRules({"embed": "fsdp", "mlp": None}, names=NAMED),
        r"w has shape \(6, 24\), and axis 0 \('embed'\) of 6 does not divide over 'fsdp' \(4\)."
        ".*uneven='replicate'",
    ),
    "no names": (rules.LogicalRules(TABLE), "w of shape .* has no logical axes. Create .* names="),
    "wrong number of names": (
        rules.LogicalRules(TABLE, names={"w": ("mlp", "embed", "mlp")}),
        r"w has shape \(6, 24\) and the logical axes .* expected a name for each axis",
    ),
    "not names": (rules.LogicalRules(TABLE, names={"w": "embed"}), "names: w is 'embed'; expected"),
    "nothing to cut": (
        rules.FSDPRule("fsdp", min_size=1, stacked=lambda path: True, over=P(None, "model")),
        r"w of shape \(6, 24\) has no axis that divides over 'fsdp' \(4\); free are: none",
    ),
    "fsdp without its axis": (rules.FSDPRule("data"), "FSDPRule: the mesh has no axis 'data'"),
    "unmatched": (rules.PathRules(("v", P())), "no pattern matches w. Add one"),
    "unused": (rules.PathRules((".", P()), ("b", P())), "no leaf takes the pattern 'b'"),
    "policy": (rules.PolicyRule(lambda path, leaf: None), "for w the function returned None"),
    "spec too long": (P(None, None, "fsdp"), r"w has shape \(6, 24\), and its spec .* 3 axes"),
    "axis twice": (P("model", "model"), "w would be cut along mesh axis 'model' twice"),
}


@pytest.mark.parametrize(("rule", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(rule, message):
    with pytest.raises((ValueError, TypeError), match=message):
        rules.shardings(rule, ARRAY, MESH)


def test_other_mistakes_are_named():
    with pytest.raises(ValueError, match="no entry 'mpl' to replace; there are"):
        TENSOR | {"mpl": None}
    for make in [
        lambda: rules.LogicalRules({}, uneven="ignore"),
        lambda: rules.FSDPRule("fsdp", uneven="ignore"),
    ]:
        with pytest.raises(ValueError, match="expected 'error' or 'replicate'"):
            make()
    with pytest.raises(ValueError, match="pick='middle'; expected 'largest' or 'first'"):
        rules.FSDPRule("fsdp", pick="middle")
    with pytest.raises(ValueError, match="expected pairs of a regular expression and a Part"):
        rules.PathRules(("w", "fsdp"))
    with pytest.raises(TypeError, match="'fsdp' is no rule: expected a callable"):
        rules.describe("fsdp", ARRAY, MESH)
    factored = state_of(optax.adafactor(1e-3, min_dim_size_to_factor=8))
    for rule in TENSOR, rules.FSDPRule("fsdp", min_size=1):
        with pytest.raises(ValueError, match=r"v_row/.* factored moment.*use rules.follow"):
            rule(factored, MESH)
    with pytest.raises(ValueError, match="an activation the logical axes 'heads' and 'mlp' are"):
        TENSOR.spec("heads", "mlp")
    with pytest.raises(TypeError, match=r"LogicalRules \| LogicalRules: expected a dict"):
        TENSOR | TENSOR
    with pytest.raises(ValueError, match=r"mu/w has shape \(3,\), and its parameter w has \(6, 24"):
        rules.follow(P(), ARRAY)({"mu": {"w": jnp.zeros(3)}}, MESH)


def test_uneven_axes_stay_whole_when_told():
    logical = rules.LogicalRules({"embed": "fsdp", "mlp": "model"}, NAMED, uneven="replicate")
    assert specs(logical, ARRAY) == {"w": P(None, "model")}
    rule = rules.FSDPRule("fsdp", min_size=1, uneven="replicate")
    described = rules.describe(rule, {"w": jnp.zeros((3, 5))}, MESH)
    assert described.replicated == {"w": "no axis divides by 'fsdp'"}
    lenient = rules.PathRules(("v", P("fsdp")), strict=False)
    assert rules.describe(lenient, ARRAY, MESH).replicated == {"w": "no pattern matches"}


def test_the_description_counts_numpys_float64_as_jax_places_it():
    tree = {"w": np.ones((16, 8))}
    assert tree["w"].dtype == np.float64 and not jax.config.jax_enable_x64
    described, placed = rules.describe(P("fsdp"), tree, MESH), rules.place(tree, P("fsdp"), MESH)
    assert set(measure.bytes_on_devices(placed).values()) == {described.bytes_per_device}
    assert described.whole_bytes == placed["w"].nbytes == 16 * 8 * 4


def test_the_table_says_what_stays_whole_and_why():
    described = rules.describe(RULES["fsdp over logical"], ABSTRACT, MESH)
    text, shown = str(described), described._repr_markdown_()
    assert "fewer than min_size=64" in text and "blocks/up/kernel" in text
    total = f"{described.bytes_per_device:,} bytes on each device of (fsdp=4, model=2)"
    assert total in text and total in shown
    assert described.bytes_per_device == sum(
        math.prod(NamedSharding(MESH, row.spec).shard_shape(row.shape)) * 4
        for row in described.rows
    )
    one = rules.describe(TENSOR, ABSTRACT, mesh.make(model=1))
    assert one.replicated["blocks/up/kernel"] == "mesh axes of size 1"
    keys = rules.describe(P(), {"rng": jax.random.key(0), "n": 3}, MESH)
    assert keys.whole_bytes == 12


def test_every_user_function_is_a_rule():
    def rule(tree, m):
        return jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), "model"), tree)

    assert specs(rule, ARRAY) == {"w": P(None, "model")}
    assert specs(rules.FSDPRule("fsdp", min_size=1, over=rule), {"w": jnp.zeros((8, 4))}) == {
        "w": P("fsdp", "model")
    }
    assert rules.describe(rule, ARRAY, MESH).bytes_per_device == 6 * 24 * 4 // 2
    for wrong, message in [
        (lambda tree, m: {"w": P("fsdp")}, "of 6 does not divide over 'fsdp'"),
        (lambda tree, m: {"w": P("nope")}, "the mesh has no axis 'nope'"),
        (lambda tree, m: {"w": None}, "expected a PartitionSpec for each of 1 arrays"),
    ]:
        for use in rules.describe, rules.shardings:
            with pytest.raises(ValueError, match=message):
                use(wrong, ARRAY, MESH)


def test_trees_may_hold_none():
    tree = {"a": None, "w": jnp.zeros((8, 4)), "z": [None, jnp.zeros(8)]}
    want = {"w": P("fsdp"), "z/1": P("fsdp")}
    for rule in (lambda tree, m: jax.tree.map(lambda _: P("fsdp"), tree)), P("fsdp"):
        assert specs(rule, tree) == want
        assert specs({"a": None, "w": rule, "z": rule}, tree) == want
    assert rules.place(tree, P("fsdp"), MESH)["a"] is None


def test_a_tree_of_rules_that_does_not_fit_is_told_without_its_arrays():
    tree = {"a": {"w": jnp.zeros((1000, 100))}, "b": jnp.zeros(3)}
    for rule, message in [
        (
            {"a": {"w": {"deep": P()}}, "b": None},
            r"does not fit the tree\. .*different types at key path\n.*\['a'\]\['w'\]\n",
        ),
        (
            {"a": P()},
            r"Give a rule, or a tree of rules.*symmetric difference on key sets is\n *(\['b'\]|b)",
        ),
        ([P(), P()], r"different types at key path\n[^\[]*\n.*<class 'list'>"),
    ]:
        with pytest.raises(ValueError, match=f"(?s){message}") as raised:
            rules.shardings(rule, tree, MESH)
        assert len(str(raised.value)) < 600


def test_a_reason_may_be_left_out():
    class Whole(Rule):
        def choose(self, leaf, mesh):
            return Choice(P())

    assert rules.describe(Whole(), ARRAY, MESH).replicated == {"w": "the rule says so"}


def test_what_belongs_to_no_parameter_follows_another_rule():
    params = nnx.to_pure_dict(ABSTRACT)["blocks"]["up"]["kernel"]
    names = {"w": (None, "embed", "mlp")}
    rule = rules.LogicalRules(TABLE, names=names)
    state = jax.eval_shape(optax.contrib.muon(1e-2, ns_coeffs=(3.4, -4.7, 2.0)).init, {"w": params})
    with pytest.raises(ValueError, match=r"ns_coeffs .* belongs to no parameter, .* by other="):
        rules.follow(rule, {"w": params})(state, MESH)
    found = specs(rules.follow(rule, {"w": params}, other=P()), state)
    assert next(spec for path, spec in found.items() if path.endswith("ns_coeffs")) == P()
    assert next(spec for path, spec in found.items() if path.endswith("mu/w")) == P(
        None, None, "model"
    )


def test_states_of_other_shapes_follow_another_rule():
    state = {"mu": {"w": jnp.zeros((6, 24))}, "history": {"w": jnp.zeros((5, 6, 24))}}
    rule = rules.follow(P(None, "model"), ARRAY, other=P(None, None, "model"))
    found = specs(rule, state)
    assert found == {"mu/w": P(None, "model"), "history/w": P(None, None, "model")}


@jax.tree_util.register_pytree_node_class
class Quantized:
    """A weight of two arrays, in one box as Linen's are."""

    def __init__(self, value, scale):
        self.value, self.scale = value, scale

    def tree_flatten(self):
        return (self.value, self.scale), None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)

    def unbox(self):
        return {"value": self.value, "scale": self.scale}

    def replace_boxed(self, value):
        return Quantized(**value)


@pytest.mark.parametrize("rule", [P("fsdp"), lambda tree, mesh: [P("fsdp")] * 2])
def test_a_box_may_have_several_arrays(rule):
    placed = rules.place({"k": Quantized(jnp.ones((8, 8)), jnp.ones((8, 1)))}, rule, MESH)["k"]
    assert [x.sharding.spec for x in (placed.value, placed.scale)] == [P("fsdp")] * 2


def test_of_one_element_what_a_function_says_is_checked_and_a_spec_is_left_out():
    with pytest.raises(ValueError, match="has no axis 'nope'"):
        rules.shardings(lambda tree, mesh: [P("nope")], {"scale": jnp.ones(1)}, MESH)
    assert specs(P("fsdp"), {"scale": jnp.ones(1)}) == {"scale": P()}
