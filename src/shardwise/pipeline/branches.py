"""The execution of steps in order, those of a branch only where it is taken."""

import itertools

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from shardwise import jaxprs


def run_steps(steps, env, stage, outputs, depth=0):
    """Run `steps` on a stage, adding what they yield to `env`, from which `outputs` are read.

    Steps that follow each other in one branch of a `cond` become a `cond` of their own, which
    yields zeros where the branch is not taken; what chooses between the branches never reads these.
    """
    wanted = {v for v in outputs if not isinstance(v, Literal)}
    groups = [(guard, list(group)) for guard, group in itertools.groupby(steps, _guard(depth))]
    for i, (guard, group) in enumerate(groups):
        later = {v for _, steps in groups[i + 1 :] for step in steps for v in _read(step)}
        if guard is None:
            for step in group:
                _run(step, env, stage)
        else:
            _run_branch(guard, group, env, stage, wanted | later, depth)


def _run(step, env, stage):
    rows = dict(step.homes or ()).get(stage)
    values = step.run(rows, *jaxprs.read(env, step.invars))
    env.update(zip(step.outvars, values, strict=True))


def _run_branch(guard, steps, env, stage, wanted, depth):
    yielded = [v for step in steps for v in step.outvars if v in wanted]

    def taken():
        inner = dict(env)
        run_steps(steps, inner, stage, yielded, depth + 1)
        return [jnp.asarray(inner[v]) for v in yielded]

    shapes = jax.eval_shape(taken)
    if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in shapes):
        values = taken()  # of keys there are no zeros
    else:
        index = jaxprs.read(env, [guard[0]])[0]
        zeros = lambda: [jnp.zeros(x.shape, x.dtype) for x in shapes]  # noqa: E731
        values = jax.lax.cond(index == guard[1], taken, zeros)
    env.update(zip(yielded, values, strict=True))


def _guard(depth):
    return lambda step: step.guards[depth] if len(step.guards) > depth else None


def _read(step):
    return [v for v in step.invars if not isinstance(v, Literal)]
