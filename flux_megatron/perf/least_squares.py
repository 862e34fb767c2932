"""Costs that are sums of named terms, fitted to measured times.

A row is (terms, measured): how much of each term a measured call has, and its time. The cost of
one unit of each term is the same for all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Terms = Mapping[str, float]
Row = tuple[Terms, float]


def total(costs: Terms, terms: Terms) -> float:
    """The predicted time. `KeyError` for a term without a cost."""
    return sum(costs[name] * amount for name, amount in terms.items())


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """The costs of least squared relative error. None is negative: a term that would be is 0.

    `ValueError` if there are fewer rows than terms, or if rows cannot tell terms apart.
    """
    names = [*rows[0][0]] if rows else []
    if len(rows) < max(1, len(names)):
        raise ValueError(f"{len(rows)} rows given, at least one for each of {names} expected")
    kept = list(names)
    while kept:
        found = dict(zip(kept, _solve(_normal(kept, rows)), strict=True))
        least = min(found, key=lambda name: found[name] * _mean(name, rows))
        if found[least] >= 0:
            return dict.fromkeys(names, 0.0) | found
        kept.remove(least)
    return dict.fromkeys(names, 0.0)


def left_out(rows: Sequence[Row]) -> list[float]:
    """For each row predicted / measured - 1 by costs that are fitted to all the others."""
    errors = []
    for index, (terms, measured) in enumerate(rows):
        costs = fit([*rows[:index], *rows[index + 1 :]])
        errors.append(total(costs, terms) / measured - 1)
    return errors


def _mean(name: str, rows: Sequence[Row]) -> float:
    return sum(terms[name] / measured for terms, measured in rows) / len(rows)


def _normal(names: Sequence[str], rows: Sequence[Row]) -> list[list[float]]:
    """The normal equations, with the right side as last column."""
    shares = [[terms[name] / measured for name in names] for terms, measured in rows]
    columns = list(zip(*shares, strict=True))
    return [
        [*(sum(a * b for a, b in zip(one, other, strict=True)) for other in columns), sum(one)]
        for one in columns
    ]


def _solve(matrix: list[list[float]]) -> list[float]:
    """Gauss with pivots, of equations scaled to a unit diagonal."""
    size = len(matrix)
    scale = [matrix[i][i] ** 0.5 for i in range(size)]
    if not all(scale):
        raise ValueError("a term that is 0 in all rows has no cost")
    a = [
        [matrix[i][j] / scale[i] / scale[j] for j in range(size)] + [matrix[i][size] / scale[i]]
        for i in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(a[row][column]))
        a[column], a[pivot] = a[pivot], a[column]
        if abs(a[column][column]) < 1e-9:
            raise ValueError("the rows cannot tell the terms apart")
        for row in range(size):
            if row != column:
                factor = a[row][column] / a[column][column]
                a[row] = [x - factor * y for x, y in zip(a[row], a[column], strict=True)]
    return [a[i][size] / a[i][i] / scale[i] for i in range(size)]
