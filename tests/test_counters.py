"""The figure of counters: found in real draws, under several layouts."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardwise import mesh
from shardwise_book import figures
from shardwise_book.figures.plots import origins


@pytest.mark.parametrize("spec", [P("a", None), P(None, "a"), P("b", "a"), P(("a", "b")), P()])
def test_each_shard_holds_the_counters_of_its_block(spec):
    key = jax.random.key(3)
    where = NamedSharding(mesh.make(a=4, b=2), spec)
    array = jax.jit(lambda key: jax.random.bits(key, (8, 16)), out_shardings=where)(key)
    found, devices = origins(key, array)
    np.testing.assert_array_equal(found, np.arange(128).reshape(8, 16))
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            assert (devices[shard.index] == shard.device.id).all()
    assert "<svg" in figures.counters(key, {"one": array})._repr_svg_()


def test_bits_of_another_key_are_refused():
    array = jax.random.bits(jax.random.key(1), (4, 4))
    with pytest.raises(ValueError, match="another key"):
        figures.counters(jax.random.key(2), {"": array})
