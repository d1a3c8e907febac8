"""Training across devices in JAX: the code that more than one chapter of the book needs.

The modules are the namespaces: `from shardwise import mesh, model, train`.
"""
