"""Measures our operations beside the libraries that they use and beside other overlap libraries.

`suites` has the cases, `candidates` and `competitors` the participants. `runner` measures,
`records` reads and writes rows, `check` compares them with `targets`, `plots` and `page` show them.
Nothing imports this package.
"""
