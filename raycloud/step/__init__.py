"""One replica's step as a transaction.

The way of a gradient, file by file: `worker.loop` takes a step's work from `feed`; `compute` lets
`replica` compute it by passes (`forward`); hooks of `sync.gradients` fill buckets in the last
backward pass, which `sync.strategy` sends over `net`; `commit` waits for the sum and decides; then
the parts of the replica (`stateful`) commit: `statistics`, and `state`, which steps the optimizer.
Off that way: `speculation`, and `consistency` where replicas may have drifted apart.
"""
