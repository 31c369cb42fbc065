"""Strategies of Hypothesis for the properties of products, by the names of `Problem`'s fields."""

from __future__ import annotations

from hypothesis import strategies as st

PROPERTIES = {
    "matrices": st.sampled_from([1, 1, 7, 300]),
    **{name: st.booleans() for name in ("aligned", "vectors", "a_along", "b_along", "by_columns", "epilogue")},
}
