"""Measures our operations beside the libraries that they use and beside other overlap libraries.

`suites` has the cases, `candidates` and `competitors` the participants. `runner` measures,
`records` says what is in a row. Only `lab.measure` imports this package.
"""
