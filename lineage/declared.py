"""Tables that are declared as classes, in the words of SQLAlchemy's ORM and without it: its import takes as long as a whole command may.

Type checkers take the three names for SQLAlchemy's. A class that derives from ``DeclarativeBase`` and has a name of a table stands for that
table in statements, and its attributes for the columns.
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
        """The annotation of a column; it is never asked for more than its text."""

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
            """What SQLAlchemy takes the class for."""
            return cls.__table__

    def mapped_column(*arguments: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A column whose name, and what is not said here, come from the annotation."""
        return arguments, options

    def _column(cls: type, name: str, noted: str) -> Column[Any]:
        """``x: Mapped[int | None] = mapped_column(…)``: annotations are texts here."""
        inner = noted.removeprefix("Mapped[").removesuffix("]")
        arguments, options = cls.__dict__.get(name, ((), {}))
        plain = inner.removesuffix(_OPTIONAL)
        type_ = () if arguments else (_TYPES[plain](),)  # a foreign key has the type of what it names
        is_key = options.get("primary_key", False)
        return Column(name, *type_, *arguments, **{"nullable": inner != plain and not is_key, **options})


__all__ = ["DeclarativeBase", "Mapped", "mapped_column"]
