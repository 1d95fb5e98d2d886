"""Declares tables as classes, in the terms of SQLAlchemy's ORM but without it: importing it takes as long as a whole command may take.

Type checkers take the three names for SQLAlchemy's. A class that derives from ``DeclarativeBase`` and has a table name stands for that
table in statements, and its attributes stand for the columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
else:
    from sqlalchemy import Boolean, Column, Double, Integer, MetaData, String, Table

    _TYPES = {"bool": Boolean, "float": Double, "int": Integer, "str": String}
    _OPTIONAL = " | None"

    class Mapped:
        """The annotation of a column; only its text is ever used."""

    class DeclarativeBase:
        """The root of the classes that share ``metadata``."""

        metadata: MetaData

        def __init_subclass__(cls) -> None:
            name = cls.__dict__.get("__tablename__")
            if name is None:
                return
            said = cls.__dict__.get("__table_args__", ())
            parts, options = ((), said) if isinstance(said, dict) else (tuple(p for p in said if not isinstance(p, dict)), {})
            options = options or next((dict(part) for part in said if isinstance(part, dict)), {})
            columns = [_column(cls, field, noted) for field, noted in cls.__annotations__.items()]
            cls.__table__ = Table(name, cls.metadata, *columns, *parts, **options)
            for column in columns:
                setattr(cls, column.key, column)

        @classmethod
        def __clause_element__(cls) -> Table:
            """The table, which SQLAlchemy uses in place of the class."""
            return cls.__table__

    def mapped_column(*arguments: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A column whose name, and all that is not given here, come from the annotation."""
        return arguments, options

    def _column(cls: type, name: str, noted: str) -> Column[Any]:
        """The column for ``x: Mapped[int | None] = mapped_column(…)``; annotations are strings here."""
        inner = noted.removeprefix("Mapped[").removesuffix("]")
        arguments, options = cls.__dict__.get(name, ((), {}))
        plain = inner.removesuffix(_OPTIONAL)
        type_ = () if arguments else (_TYPES[plain](),)  # a foreign key has the type of the column that it refers to
        is_key = options.get("primary_key", False)
        return Column(name, *type_, *arguments, **{"nullable": inner != plain and not is_key, **options})


__all__ = ["DeclarativeBase", "Mapped", "mapped_column"]
