"""For the reference: functions that take their options as one TypedDict are shown with each option
as a parameter.

Those whose docstring describes the options in one piece stay as they are.
"""

from __future__ import annotations

from typing import Any

import griffe

_UNPACK = "Unpack["


class Unpacked(griffe.Extension):
    """Puts the keys of ``**options: Unpack[Options]`` in its place, before docstrings are
    compared with signatures."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Every function of the package. TypedDicts are in the module of the function, or are
        imported there."""
        _walk(pkg)


def _walk(within: griffe.Object) -> None:
    for member in list(within.members.values()):
        if member.is_alias:
            continue
        if isinstance(member, griffe.Function):
            _spell_out(member)
        elif isinstance(member, griffe.Module | griffe.Class):
            _walk(member)


def _spell_out(function: griffe.Function) -> None:
    last = list(function.parameters)[-1:]
    if (
        not last
        or last[0].kind is not griffe.ParameterKind.var_keyword
        or not str(last[0].annotation).startswith(_UNPACK)
    ):
        return
    if function.docstring is not None and f":param {last[0].name}:" in function.docstring.value:
        return
    options = function.module[str(last[0].annotation).removeprefix(_UNPACK).removesuffix("]")]
    kept = [each for each in function.parameters if each is not last[0]]
    spelt = [
        griffe.Parameter(
            name, annotation=key.annotation, kind=griffe.ParameterKind.keyword_only, default="..."
        )
        for name, key in options.attributes.items()
    ]
    function.parameters = griffe.Parameters(*kept, *spelt)
