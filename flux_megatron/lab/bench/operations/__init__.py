"""Operations that are no linear layer of a training run, each beside its unfused baseline:
`flux-megatron bench operations`.

A module a name of `options.OPERATIONS`, with `cases(run)` and `measure(run, case, rounds)`, which
verifies the case, then writes rows of a table of its own. Both are collective.
"""
