"""Measures our operations beside the libraries they are made of and beside every installed peer.

`suites` says what, `candidates` and `peers` say who, `runner` measures, `records` keeps the rows,
`check` holds them against `targets`, `plot` and `report` show them. Nothing imports this package.
"""
