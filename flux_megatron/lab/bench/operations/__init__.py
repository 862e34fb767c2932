"""Operations that are no linear layer of a training run, each beside its unfused baseline:
`flux-megatron bench operations`.

A module a name of `options.OPERATIONS`, with `cases(run)`, `verify(run)`, which says what is wrong,
or "", and `measure(run, case, rounds)`, which writes rows of a table of its own. All are
collective.
"""
