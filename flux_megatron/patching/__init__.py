"""Our patch of Megatron-LM: whether it fits a checkout, put in and taken out.

The patch counts the lines of the function that it goes into, and is inserted there, whatever text
is there. So each version that it was made for has fingerprints: hashes of that function, and of
those that `integration` takes over or relies on. The patch is applied only where all of them are
unchanged; where the function stands in its file does not matter.

`series.py` reads `patches/`, `fingerprints.py` looks at functions, `checkout.py`
brings both together, `commands.py` is `flux-megatron patch`. Megatron is read as text, never
imported.
"""
