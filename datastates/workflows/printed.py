"""Rich tables and groups that ``print`` can show too, in an interactive session and in a notebook."""

from __future__ import annotations

import shutil
from io import StringIO

from rich.console import Console, Group
from rich.jupyter import JupyterMixin
from rich.table import Table

__all__ = ["PrintedGroup", "PrintedTable"]


class _Printed(JupyterMixin):
    """A renderable whose text is what a terminal would show, without colours."""

    __slots__ = ()

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=max(80, shutil.get_terminal_size((120, 40)).columns), no_color=True)
        with console.capture() as captured:
            console.print(self)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    __repr__ = __str__


class PrintedTable(_Printed, Table):
    """A table."""


class PrintedGroup(_Printed, Group):
    """Parts, one below the other."""
