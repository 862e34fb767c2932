"""Costs that are sums of named terms: how much of each a call has, and what a unit of each takes.

The units were fitted by non-negative least squares of relative errors.
"""

from __future__ import annotations

from collections.abc import Mapping

Terms = Mapping[str, float]


def total(costs: Terms, terms: Terms) -> float:
    """The predicted time. `KeyError` for a term without a cost."""
    return sum(costs[name] * amount for name, amount in terms.items())
