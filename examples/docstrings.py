"""A small text task that every Python has: from which package of its standard library does a
docstring come?"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections import Counter
from pathlib import Path

_LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idlelib")


def load(packages: int, limit: int) -> tuple[list[str], list[int], list[str]]:
    """At most ``limit`` docstrings, each once and in mixed order, their labels, and the names of
    the ``packages`` that have most."""
    root, found = Path(sysconfig.get_path("stdlib")), dict[str, str]()
    for path in sorted(root.glob("*/**/*.py")):
        parts = path.relative_to(root).parts
        if parts[0] not in _LEFT_OUT and "test" not in parts and "tests" not in parts:
            for text in _docstrings(path):
                found.setdefault(text, parts[0])
    names = sorted(name for name, _ in Counter(found.values()).most_common(packages))
    chosen = sorted((text, names.index(name)) for text, name in found.items() if name in names)
    random.Random(0).shuffle(chosen)
    return [text for text, _ in chosen[:limit]], [label for _, label in chosen[:limit]], names


def _docstrings(path: Path) -> list[str]:
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return []
    texts = [
        ast.get_docstring(node)
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
    ]
    return [text for text in texts if text is not None and len(text) > 30]
