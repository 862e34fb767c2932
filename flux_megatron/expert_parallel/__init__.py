"""Expert parallelism: the GEMMs of a Mixture of Experts with their all-to-all.

`ops` has the public operations, `call` the checks and the choice of a strategy; `hopper`, `fused`,
`signalled` and `sequential` are the strategies. Rows for an expert are counted on the device, so no
`Problem` has their number, and no cost model chooses: `tune` measures, `plans` keeps.
"""
