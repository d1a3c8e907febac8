import jax
import jax.numpy as jnp
import optax

from shardwise import layouts, mesh

mesh.simulate(8)  # eight devices on your CPU; accelerators, if there are eight
layout = layouts.Layout(mesh.make(data=2, fsdp=4), data="data", fsdp="fsdp")


def create(key):  # as on one device
    return {"w": jax.random.normal(key, (256, 1024)), "v": jnp.zeros((1024, 256))}


def loss(params, x):  # as on one device
    return jnp.mean((jax.nn.relu(x @ params["w"]) @ params["v"] - x) ** 2)


key, tx = jax.random.key(0), optax.adam(1e-3)
batch = jax.random.normal(jax.random.key(1), (64, 256))
print(layouts.predict(layout, jax.eval_shape(create, key), batch, tx))  # before anything runs
params, state = layouts.init(layout, create, tx, key)  # born in shards
params, state, mean = layouts.step(layout, loss, tx)(params, state, batch)
print(f"loss {mean:.4f}, on one device {loss(create(key), batch):.4f}")
