"""What a user would pick instead of a layout of the same roles: jit with rules, scalax, recipes."""

import dataclasses
import functools

import floors
import jax
import jax.numpy as jnp
import optax
import recipes
import rounds
from decoders import OPTIMIZER, SEED, batch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import marks, rules, tensor
from shardwise import tree as trees
from shardwise.layouts import Layout

ANY = "any"  # the strategy of what the compiler chooses: it is compared with all


def of(layout: Layout, bench):
    """The rows of a layout's roles; stages have theirs in `pipeline.py`."""
    if layout.stage:
        return
    yield from by_rules(layout, bench)
    if set(layout.roles()) == {"fsdp"} and layout.zero == 3:
        yield from by_scalax(layout, bench)
    if set(layout.roles()) == {"context"}:
        for form, attend in recipes.RECIPES.items():
            yield by_shard_map(layout, bench, form, attend)


def by_rules(layout, bench):
    """jit, its arguments laid out by rules; activations left free, or pinned.

    With ZeRO 1 and 2 the optimizer's state is cut and parameters are not; with 2 gradients are.
    """
    spec = P(layout.rows or None, layout.context or None)
    cut, told = parameters(layout, bench), ""
    given = cut if layout.zero == 3 else P(), rules.follow(cut, bench.abstract), spec
    settings = dict(microbatches=layout.microbatches)
    if layout.fsdp and layout.zero < 3:
        told = f", ZeRO {layout.zero}"
    if layout.fsdp and layout.zero == 2:
        settings["pin"] = lambda grads: rules.constrain_tree(grads, cut, layout.mesh)
    run = functools.partial(bench.step, **settings)
    tensors = layout.tensor or None
    names = tensor.activations(tensors, layout.rows or None, layout.context or None)
    for how, pins in (("", None), (", constrained", names)):
        step = rules.jit(
            run,
            layout.mesh,
            in_rules=given,
            out_rules=(*given[:2], P()),
            names=pins,
            donate_argnums=(0, 1),
        )
        shardings = rules.shardings(given, arguments(bench, abstract=True), layout.mesh)
        found = row(f"rules{told}{how}", layout, bench, step, shardings)
        found.strategy = floors.strategy(layout) if layout.fsdp else ANY
        yield found


def parameters(layout, bench):
    """One rule for all of a layout's roles."""
    boxes = [box for _, _, box in trees.walk(bench.abstract)]
    names = {name for box in boxes for name in trees.axis_names(box) or () if name}
    table = dict.fromkeys(names) | dict.fromkeys(layout.cut, layout.tensor or None)
    table = {name: axes for name, axes in table.items() if name in names}
    table |= {"experts": layout.expert} if layout.expert else {}
    over = rules.LogicalRules(table)
    return rules.FSDPRule(layout.fsdp, 0, over=over) if layout.fsdp else over


def by_scalax(layout, bench):
    """scalax' own rule for FSDP."""
    try:
        from scalax import sharding as scalax
    except ImportError as error:
        why = f"{error}: pip install -r benchmarks/requirements.txt"
        yield rounds.Missing("scalax", why)
        return

    helper = scalax.MeshShardingHelper([-1], ["fsdp"])
    rule = scalax.FSDPShardingRule(min_fsdp_size=0)
    pins = dict.fromkeys(tensor.activations(None), P("fsdp"))
    for told, names in (("", None), (", constrained", pins)):
        step = helper.sjit(
            functools.partial(bench.step, constrain=scalax.with_sharding_annotation),
            in_shardings=(rule, rule, P("fsdp")),
            out_shardings=(rule, rule, P()),
            annotation_shardings=names,
            donate_argnums=(0, 1),
        )
        shardings = helper.match_sharding_rule((rule, rule, P("fsdp")), arguments(bench, True))
        yield row(f"scalax{told}", layout, bench, step, shardings)


def by_shard_map(layout, bench, form, attend):
    """The gradient of one device's tokens in a shard_map, and its sum over the devices."""
    (axis,) = layout.context

    def device(params, batch):
        def total(params):
            with marks.bind(attend=attend(axis), index=index):
                mean = bench.loss(params, batch)
            return mean.total, mean.count

        (sum_, count), grads = jax.value_and_grad(total, has_aux=True)(params)
        return jax.lax.psum((sum_, count, grads), axis)

    def index(_, size):
        return jax.lax.axis_index(axis) * size + jnp.arange(size, dtype=jnp.int32)

    def step(params, opt_state, batch):
        manual = jax.shard_map(
            device, mesh=layout.mesh, in_specs=(P(), P(None, axis)), out_specs=P(), check_vma=False
        )
        total, count, grads = manual(params, batch)
        grads = jax.tree.map(lambda g: g / count, grads)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, total / count

    whole, cut = (NamedSharding(layout.mesh, spec) for spec in (P(), P(None, axis)))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=whole)
    name = f"shard_map, plain {form}"
    found = row(name, layout, bench, jitted, (whole, whole, cut))
    found.strategy = floors.strategy(dataclasses.replace(layout, attention=form))
    return found


def arguments(bench, abstract=False):
    """(params, opt_state, batch), as one device has them."""
    if abstract:
        return bench.abstract, jax.eval_shape(OPTIMIZER.init, bench.abstract), batch()
    params = jax.jit(bench.create)(jax.random.key(SEED))
    return params, jax.jit(OPTIMIZER.init)(params), batch()


def row(name, layout, bench, step, shardings):
    """The measured row of a jitted step, arguments laid out so."""
    *state, tokens = map(jax.device_put, arguments(bench), shardings)
    found = rounds.Row(name, layout.mesh, step, state, tokens)
    found.strategy = ""
    return found
