"""The distinct keys of a table: metrics, attributes, settings."""

from __future__ import annotations

from sqlalchemy import CTE, Table, func, select

__all__ = ["keys_of"]


def keys_of(belongs: Table) -> CTE:
    """The distinct keys, each by a look-up beyond the one before (a loose index scan). The last row is NULL."""
    key = belongs.c.key
    walk = select(func.min(key).label("key")).cte("keys", recursive=True)
    following = select(func.min(key)).where(key > walk.c.key).scalar_subquery()
    return walk.union_all(select(following).where(walk.c.key.is_not(None)))
