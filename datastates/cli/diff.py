"""``diff``: what changed from one state to another."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from .complete import ref_names
from .payload import progress_of
from .shell import AsJson, Repo, Shell

if TYPE_CHECKING:
    from rich.console import RenderableType

    from datastates.algebra.diff import Diff, TensorChange

__all__ = ["register"]

STAT = "no payload was read: 'unread' tensors lie in chunks that differ, and may have changed; without --stat they are compared"


class Order(StrEnum):
    """The key by which tensors are sorted."""

    TREE = "tree"
    CHANGE = "change"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(diff)


def diff(
    context: typer.Context,
    old: Annotated[str, typer.Argument(metavar="OLD", help="A state: uid, name, main~3, main@best:val_loss, …", autocompletion=ref_names)],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Another one.", autocompletion=ref_names)] = "main",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="PATTERN", help="Only these objects or tensors: model, 'model/*.weight'; may be repeated.", show_default=False
        ),
    ] = None,
    stat: Annotated[
        bool, typer.Option("--stat", help="Only count, by the manifests: no payload is read, and what may have changed is 'unread'.")
    ] = False,
    order: Annotated[Order, typer.Option("--sort", help="The order: as in the tree, or what changed most first.")] = Order.TREE,
    show_same: Annotated[bool, typer.Option("--all", "-a", help="Also show tensors that did not change.")] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Compare two states: configuration, each tensor, metrics, values and code."""
    shell = Shell(context, repo, as_json)
    with shell.repository() as repository, progress_of(shell) as progress:
        bar = progress.add_task("comparing", total=None)
        found = repository.diff(
            old, new, only=only or None, stat=stat, on_progress=lambda done, total: progress.update(bar, completed=done, total=total)
        )
    if shell.as_json:
        from datastates.algebra.diff import to_plain

        shell.write_json(to_plain(found))
        return
    tensors = [] if stat else [tensor for tensor in found.tensors if show_same or tensor.change != "same"]
    if order is Order.CHANGE:
        tensors.sort(key=lambda tensor: -(tensor.relative or 0.0))
    shell.write(*_heading(found), *_settings(found), *([_tensors_table(tensors)] if tensors else []), *_rest(found))
    for remark in [*([STAT] if stat and not found.lacking else []), *_instead(found)]:
        shell.hint(remark)


def _instead(found: Diff) -> list[str]:
    """The bytes that are lacking, and the command that compares the states that can be had instead."""
    if not found.lacking:
        return []
    nearest = {lacking.state: lacking.nearest for lacking in found.lacking}
    sides = [nearest.get(state.uid, state) for state in (found.old, found.new)]
    remarks = [f"tensors could not be compared: {lacking.why}" for lacking in found.lacking]
    if sides[0] is not None and sides[1] is not None and sides[0].uid != sides[1].uid:
        remarks.append(f"the nearest that can be: datastates diff {sides[0].uid[:10]} {sides[1].uid[:10]}")
    return remarks


def _heading(found: Diff) -> list[RenderableType]:
    from .render import short, state_text

    base = "they have no common ancestor" if found.base is None else f"their nearest common ancestor is {short(found.base.uid)}"
    if found.base is not None and found.base.uid in {found.old.uid, found.new.uid}:
        steps = found.new.step - found.old.step
        base = f"{abs(steps)} step{'' if abs(steps) == 1 else 's'} {'on' if steps >= 0 else 'back'}"
    return [state_text(found.old), state_text(found.new), base]


def _settings(found: Diff) -> list[RenderableType]:
    """The lines about the configuration, which explains the other changes."""
    from .render import facts_table

    return [facts_table([("config", f"{key}: {_value(old)} -> {_value(new)}") for key, (old, new) in found.config.items()])] * bool(
        found.config
    )


def _tensors_table(tensors: list[TensorChange]) -> RenderableType:
    from .render import table

    made = table("tensor", "shape", "norm", "change / norm", "cosine", "largest change", "changed")
    for tensor in tensors:
        if tensor.distance is None:
            was = "" if tensor.old_shape is None else f", was {tensor.old_dtype} {_shape(tensor.old_shape)}"
            made.add_row(tensor.path, _shape(tensor.shape), f"{tensor.change}{was}")
            continue
        recast = "" if tensor.old_dtype is None else f" {tensor.old_dtype} -> {tensor.dtype}"
        made.add_row(
            tensor.path,
            _shape(tensor.shape) + recast,
            _number(tensor.norm),
            _number(tensor.relative),
            "" if tensor.cosine is None else f"{tensor.cosine:.6f}",
            "" if not tensor.largest else f"{_number(tensor.largest)} at {_shape(tensor.at or ())}",
            f"{100 * (tensor.fraction or 0.0):.3g} %",
        )
    return made


def _rest(found: Diff) -> list[RenderableType]:
    from .render import facts_table

    counts = [f"{found.count(change)} {change}" for change in dict.fromkeys(tensor.change for tensor in found.tensors)]
    facts: list[tuple[str, object]] = [("tensors", "not compared" if found.lacking else ", ".join(counts) or "none")]
    for name in ("metrics", "values", "attributes", "versions"):
        word = name.removesuffix("s") if name != "values" else "value"
        facts += [(word, f"{key}: {_value(old)} -> {_value(new)}") for key, (old, new) in getattr(found, name).items()]
    if found.code is not None:
        facts.append(("code", f"{_value(found.code[0])} -> {_value(found.code[1])}"))
    return [facts_table(facts)]


def _shape(sizes: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, sizes)) + "]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _value(value: object) -> str:
    text = "nothing" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
