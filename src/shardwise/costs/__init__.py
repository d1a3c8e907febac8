"""Costs of a layout: bytes that a device holds, and sends in a step, from plain numbers.

Rooms that know different things of a program ask for them, so that what is sent is derived once:

- `layouts.predict` knows the arrays of any tree: how a rule lays each, what a traced stage reads.
  `costs.ledger` adds up what collectives of these sizes send.
- `plan` knows a decoder's sizes, and has no array: `costs.arrays` has what a layout makes of them,
  `costs.sent` the bytes sent, by the same ledger, and `costs.memory` those held.

What one layer's attention, tensor parallelism or experts send is told where these are written, by
`context.bytes_sent`, `tensor.collectives` and `experts.bytes_sent`.
"""
