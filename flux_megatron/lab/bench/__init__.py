"""Measures our operations beside the libraries that they use and beside other overlap libraries.

`suites` has the cases, `candidates` and `competitors` the participants. `runner` measures,
`records` reads and writes rows, `report` makes a table of them.
Nothing imports this package.
"""
