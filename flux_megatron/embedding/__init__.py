"""Embedding + All-to-All: bags of table-wise sharded tables, pooled by the tables' owners for the
whole batch and wanted by each rank for its own samples.

`operation` is public; `bags` says what a call is and what is wrong with it; `fused_bags` and
`sequential_bags` compute it. Above `symm` and `kernels`, beside `overlap`, whose GEMMs it has none
of.
"""
