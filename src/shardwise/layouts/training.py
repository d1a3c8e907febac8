"""A layout put to work: parameters, loss and gradient, the whole step."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import mesh, rules
from shardwise import tree as trees
from shardwise.fsdp.arrays import laid_out
from shardwise.layouts import exact, first_call, gradients, placing
from shardwise.layouts.layout import Layout, check_given
from shardwise.layouts.matrices import whole_in_products
from shardwise.layouts.placing import parameter_rule, state_rule


def shardings(layout: Layout, params: Any, tx: Any = None) -> Any:
    """The NamedSharding of each parameter; with `tx` a pair of these and of its state's.

    `params` may be abstract: `jax.eval_shape(create, key)`. Arrays keep their true shapes: they can
    be made by `jax.jit(create, out_shardings=...)`, placed by `jax.device_put`, or restored.

    Raises:
      ValueError: an array that a role cannot cut, by its path, with the size that would do.
    """
    check_given("layouts.shardings", layout, tx)
    found = placing.shardings(layout, params, tx, "layouts.shardings")
    return jax.tree.map(lambda to: NamedSharding(layout.mesh, to.spec), found)


def place(layout: Layout, tree: Any) -> Any:
    """The parameters in `tree`, as one device has them, laid out; inside jit, they are born so.

    Raises:
      ValueError: as `shardings`.
    """
    check_given("layouts.place", layout)

    def lay(tree):
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
        # Inside jit a device_put is a wish; a constraint is kept.
        put = jax.lax.with_sharding_constraint if traced else jax.device_put
        return put(tree, placing.shardings(layout, tree, None, "layouts.place"))

    return mesh.for_caller(lay, layout.mesh, functools.partial(_specs, layout))(tree)


def whole(layout: Layout, tree: Any) -> Any:
    """The arrays that `place`, `init` or a step returned, whole on every device: `rules.whole`."""
    return rules.whole(tree)


def init(layout: Layout, create: Callable, tx: Any, key: jax.Array) -> tuple[Any, Any]:
    """(params, opt_state), where params are `create(key)`, and opt_state is `tx`'s state for them.

    Each array is born where it lives; an exact layout makes them whole on a device first.

    Raises:
      ValueError: as `shardings`.
    """
    check_given("layouts.init", layout, tx, is_needed=True)

    def make(key):
        shapes = jax.eval_shape(create, key)
        of_params, of_state = placing.shardings(layout, shapes, tx, "layouts.init")
        if layout.exact:
            return exact.laid(exact.init(layout, create, tx, key), (of_params, of_state))
        params = jax.jit(create, out_shardings=of_params)(key)
        return params, jax.jit(tx.init, out_shardings=of_state)(params)

    return mesh.for_caller(make, layout.mesh, lambda out: _specs(layout, out[0], tx))(key)


def _update(layout, tx, grads, opt_state, params, **extra):
    """`tx.update` by the compiler, matrices that it multiplies gathered once; it lies as it did."""
    update = functools.partial(tx.update, **extra)
    updates, state = whole_in_products(update, layout.auto, grads, opt_state, params)
    state = rules.constrain_tree(state, state_rule(layout, params), layout.auto)
    return rules.constrain_tree(updates, parameter_rule(layout), layout.auto), state


def value_and_grad(
    layout: Layout, loss: Callable, has_aux: bool = False, aux: Any = "sum", check: bool = True
) -> Callable:
    """A function of `(params, batch, *args, key=None)`: the mean over the batch, and its gradient.

    `loss(params, batch, *args)` is written for one device, with marks where a role needs them:
    `marks.attend` for context by hand, `marks.stage_boundary` for stages. What it returns, and
    `has_aux`, `aux` and keys: see `shardwise.objective`. `batch` is a tree of the arrays of all
    rows, which the function cuts: NumPy's (of several processes the same in each), or JAX's,
    committed to no device or in any layout over the mesh's. So may `params` be, but if the layout
    is `by_hand` and not exact they lie as `init` or `place` returns them. The gradient always does,
    in the parameters' dtypes.

    Where the layout divides batches, the first call with real arrays judges the loss, as
    `objective.check` does; `check=False` leaves that out. The function is jitted, except for an
    exact layout, which refuses a jit around it. Within a jit of yours the loss is not judged, and a
    warning says so (call `objective.check` once); nor is it by the function's `lower` and `trace`.

    Raises, when called:
      Indivisible: a loss that changes if its batch is divided (a ValueError).
      ValueError: rows, or a sequence, that do not divide; parameters that lie otherwise; what
        `fsdp.value_and_grad` and `pipeline.value_and_grad` raise.
    """
    who = "layouts.value_and_grad"
    run = gradients.mean_and_grad(layout, loss, has_aux, aux, who)
    if layout.exact:
        run = exact.value_and_grad(layout, run, who)
    run = first_call.checked(run, layout, who)
    run = first_call.judged(run, layout, loss, has_aux, aux, who) if check else run

    return mesh.for_caller(run, layout.mesh, lambda out: (_whole(out[0]), _specs(layout, out[1])))


def value(layout: Layout, loss: Callable, has_aux: bool = False, aux: Any = "sum") -> Callable:
    """A function of `(params, batch, *args, key=None)`: the mean over the batch, or (mean, aux).

    It is for an evaluation: the backward pass is not computed, and the loss not judged. It is
    jitted, except for an exact layout. Arguments are as in `value_and_grad`, but parameters may
    always lie in any layout over the mesh's devices: the function moves them.
    """
    run = gradients.mean_and_grad(layout, loss, has_aux, aux, "layouts.value", backward=False)

    def mean(params, batch, *args, key=None):
        return run(params, batch, *args, key=key)[0]

    return mesh.for_caller(mean if layout.exact else jax.jit(mean), layout.mesh, _whole)


def _specs(layout, params, tx=None):
    return jax.tree.map(lambda to: to.spec, shardings(layout, params, tx))


def _whole(tree):
    return jax.tree.map(lambda _: P(), tree)


def step(
    layout: Layout,
    loss: Callable,
    tx: Any,
    has_aux: bool = False,
    aux: Any = "sum",
    frozen: Callable[[str], bool] | None = None,
    check: bool = True,
) -> Callable:
    """A function `(params, opt_state, batch, *args, key=None) -> (params, opt_state, mean[, aux])`.

    `params` and `opt_state` are what `init` returns. Both are donated (by an exact layout all but
    arrays that it cuts): use only what is returned. The function is jitted, except for an exact
    layout. An optimizer whose update takes `value=` gets the mean, and by `grad=` the gradients.
    `loss`, `batch`, `has_aux`, `aux` and `check` are as in `value_and_grad`.

    `frozen` is a predicate on paths, strings such as "norm/mean" (`tree.leaves`), true for
    parameters that the loss sets, such as running statistics. The optimizer's update of these is
    dropped, but it gets their gradients. The loss then returns `(mean, aux)`, whatever `has_aux`
    says, and its aux is a dict whose entry "frozen" is {path: new value}; values of parts of the
    batch are averaged, each part alike whatever its count. The step returns the dict's other
    entries as aux, joined as `aux` says: an empty dict if there are none.

    Raises, when called:
      Indivisible: a loss that changes if its batch is divided (a ValueError).
      TypeError: an optimizer that evaluates the loss again, as a line search does; with `frozen`,
        another aux.
      ValueError: with `frozen`, new values of other paths or shapes than those parameters have.
    """
    check_given("layouts.step", layout, tx, is_needed=True)
    if frozen is not None:
        loss, has_aux, aux = _apart(loss), True, ("mean", aux)
    mean_and_grad = gradients.mean_and_grad(layout, loss, has_aux, aux, "layouts.step")

    def outputs(params, batch, *args, key=None):
        """(mean, new values of what is frozen, gradients, what comes out beside the state)."""
        out, grads = mean_and_grad(params, batch, *args, key=key)
        mean, *rest = out if has_aux else (out,)
        new, *rest = rest[0] if frozen is not None else ({}, *rest)
        if frozen is not None:
            _check_new(new, params, frozen)
        return mean, new, grads, (mean, *rest)

    def run(params, opt_state, batch, *args, key=None):
        *found, out = outputs(params, batch, *args, key=key)
        update = functools.partial(_update, layout, tx)
        params, opt_state = _updated(tx, update, params, opt_state, *found)
        if frozen is not None:
            params = rules.constrain_tree(params, parameter_rule(layout), layout.auto)
        return params, opt_state, *out

    if layout.exact:
        run = exact.step(layout, tx, functools.partial(_updated, tx, tx.update), outputs)
    else:
        run = first_call.checked(jax.jit(run, donate_argnums=(0, 1)), layout, "layouts.step")
    run = first_call.judged(run, layout, loss, has_aux, aux, "layouts.step") if check else run
    if layout.by_hand and not layout.exact:
        run = laid_out(run, parameter_rule(layout), layout.auto, "layouts.step")

    def specs(out):
        params, _, *rest = out
        return *_specs(layout, params, tx), *_whole(rest)

    return mesh.for_caller(run, layout.mesh, specs)


def _updated(tx, update, params, opt_state, mean, new, grads):
    """(params, opt_state) after `tx`'s update, with the `new` values by their paths."""
    told = dict(value=mean, grad=grads, value_fn=_no_loss)  # some ask, as `optax.polyak_sgd`
    taken = inspect.signature(tx.update).parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in taken):
        told = {each.name: told[each.name] for each in taken if each.name in told}
    updates, opt_state = update(grads, opt_state, params, **told)
    params = optax.apply_updates(params, updates)
    found = [new[path].astype(x.dtype) if path in new else x for path, x in trees.leaves(params)]
    return jax.tree.unflatten(jax.tree.structure(params), found), opt_state


def _no_loss(*args, **options):
    raise TypeError(
        "layouts.step: the optimizer evaluates the loss again within its update, as a line search "
        "does, and a step has no loss for it. Take another, or write the step with "
        "layouts.value_and_grad."
    )


def _apart(loss):
    """`loss`, whose aux is a dict with "frozen" {path: new value}, with aux (these, the rest)."""

    def split(params, *args, **options):
        mean, aux = loss(params, *args, **options)
        if not isinstance(aux, dict) or not isinstance(aux.get("frozen"), dict):
            raise TypeError(
                f"layouts.step: with frozen=, the loss returns (mean, aux), and aux is a dict with "
                f"'frozen': {{path: new value}}; got {type(aux).__name__}"
                f"{f' with {sorted(aux)}' if isinstance(aux, dict) else ''}."
            )
        rest = {name: x for name, x in aux.items() if name != "frozen"}
        return mean, (jax.lax.stop_gradient(aux["frozen"]), rest)

    return split


def _check_new(new, params, frozen):
    """Raise where these are no new values for the parameters that are `frozen`."""
    named = {path: jnp.shape(x) for path, x in trees.leaves(params) if frozen(path)}
    given = {path: jnp.shape(x) for path, x in new.items()}
    if named != given:
        raise ValueError(
            f"layouts.step: frozen= names {named}, and the loss returns new values for {given}; "
            f"expected one for each, of its shape."
        )
