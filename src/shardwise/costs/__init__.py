"""Costs of a layout: bytes that a device holds, and sends in a step, from plain numbers.

`costs.ledger` adds up what collectives send: for `layouts.predict`, which knows the arrays of any
tree, and for `plan`, which knows a decoder's sizes alone. Of these `costs.arrays` has what a layout
makes of them, `costs.sent` the bytes sent, `costs.memory` those held, and `costs.terms` what of
these is there during a step alone. What attention, tensor parallelism and experts send is told by
`bytes_sent` of a form of `context`, by `tensor.collectives` and by `experts.bytes_sent`.
"""
