"""Expert parallelism: the GEMMs of a Mixture of Experts with their all-to-all.

`ops` has the public operations, `call` the checks and the choice of a strategy; `fused`,
`signalled` and `sequential` are the strategies. Rows for an expert are counted on the device, so no
`Problem` has their number, and neither the tuner nor the cost model of the other patterns applies.
"""
