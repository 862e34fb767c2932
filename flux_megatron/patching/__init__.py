"""Our patches of Megatron-LM: which ones fit a checkout, put in and taken out by `git apply`.

Hunks without context go to their line numbers, whatever text is there. So the patches of a
version come with fingerprints: hashes of the functions that they go into, and of those that
`integration` takes over or relies on. Only where all of them are unchanged are the patches applied;
a function that has only moved in its file takes its hunk along.

`series.py` reads a folder of `patches/`, `fingerprints.py` looks at functions, `checkout.py`
brings both together, `commands.py` is `flux-megatron patch`. Megatron is read as text, never
imported.
"""
