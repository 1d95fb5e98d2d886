"""The structure of the source: nobody reaches into another module's private names, and no
modules import each other in a circle."""

import ast
import importlib
import logging
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "datastates": "datastates",
    "lineage": "datastates.lineage",
    "transport": "datastates.transport",
    "api": "datastates.api",
}


def _sources() -> Iterator[tuple[str, Path]]:
    """Every module of ours, by its name; the links inside ``datastates/`` are not followed."""
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            is_linked = folder == "datastates" and inside.parts[0] in FOLDERS
            if not is_linked and inside.parts[0] not in ("ui", "static"):
                parts = [package, *inside.with_suffix("").parts]
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = {name: (path, ast.parse(path.read_text(encoding="utf-8"))) for name, path in _sources()}


TORCHS = {
    "datastates.state.geometry": {"_indices", "_values"},  # of sparse tensors
    "datastates.state.tree": {"_metadata", "_modules"},  # of nn.Module
    "datastates.state.model": {"_metadata"},
    "datastates.state.report": {"_metadata"},
    "datastates.training.script_checks": {"_base", "_version"},  # of tensors
    "datastates.lineage.views.detail": {"_mapping"},  # of SQLAlchemy's rows
}
"""Private names of torch and SQLAlchemy that these modules take, and that others of ours happen
to use too."""


def _is_private(name: str) -> bool:
    # ctypes' own end with one
    return name.startswith("_") and not name.startswith("__") and not name.endswith("_")


def _defined(tree: ast.Module) -> set[str]:
    """The private names that a module gives a meaning to: functions, classes, variables,
    attributes, slots."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return {name for name in found if _is_private(name)}


def _reaches(name: str, tree: ast.Module, owners: dict[str, set[str]]) -> Iterator[str]:
    """Private names that a module uses and another module of ours defines."""
    own = _defined(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "super")):
                continue
            case ast.Attribute(attr=attr) if attr in TORCHS.get(name, ()):
                continue
            case ast.Attribute(attr=attr, lineno=line) if (
                _is_private(attr) and attr not in own and owners.get(attr, set()) - {name}
            ):
                yield (
                    f"{name}:{line} takes .{attr}, which is private to"
                    f" {' or '.join(sorted(owners[attr] - {name})[:3])}"
                )
            case ast.ImportFrom(module=module, names=names, lineno=line, level=level) if level or (
                module or ""
            ).startswith("datastates"):
                for alias in names:
                    if _is_private(alias.name):
                        yield f"{name}:{line} imports {alias.name} from {module}"


def _imports(name: str, path: Path, tree: ast.Module) -> Iterator[str]:
    """The modules of ours that a module imports anywhere, except for types only: two classes that
    name each other in annotations need no protocol in between."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name in MODULES)
            case ast.ImportFrom(module=module, names=names, level=level):
                parts = package.split(".")
                base = (
                    ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])
                    if level
                    else module or ""
                )
                for alias in names:
                    yield from (
                        [f"{base}.{alias.name}"]
                        if f"{base}.{alias.name}" in MODULES
                        else [base]
                        if base in MODULES
                        else []
                    )


def test_no_module_reaches_into_the_private_names_of_another() -> None:
    owners: dict[str, set[str]] = {}
    for name, (_, tree) in MODULES.items():
        for private in _defined(tree):
            owners.setdefault(private, set()).add(name)
    reaches = [
        reach for name, (_, tree) in MODULES.items() for reach in _reaches(name, tree, owners)
    ]
    assert not reaches, f"{len(reaches)} reaches:\n" + "\n".join(reaches)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = nx.DiGraph(
        (name, other)
        for name, (path, tree) in MODULES.items()
        for other in _imports(name, path, tree)
        if other != name
    )
    circles = [sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1]
    assert not circles, "\n".join(" <-> ".join(circle) for circle in circles)


def test_the_graph_of_imports_sees_imports_of_every_kind() -> None:
    tree = ast.parse(
        "import datastates.errors\ndef f():\n    from .config import Config\nfrom .lineage import"
        " states\nfrom .values import shown"
    )
    found = set(_imports("datastates.repository", Path("repository.py"), tree))
    assert found == {
        "datastates.errors",
        "datastates.config",
        "datastates.lineage.states",
        "datastates.values",
    }


def test_a_reach_into_private_names_is_seen() -> None:
    tree = ast.parse(
        "class A:\n    def f(self, repo):\n        self._own = repo._database\n        return"
        " repo._own, self._database"
    )
    assert [*_reaches("here", tree, {"_database": {"there"}, "_own": {"there"}})] == [
        "here:3 takes ._database, which is private to there"
    ]


NOT_TIERS = {
    "datastates.system.memory": "the controller of that name in the kernel's groups",
    "datastates.cli.doctor": "what doctor calls the machine's",
    "datastates.transport.server": "the scheme of memory: addresses",
    "datastates.transport.in_process": "the same",
    "datastates.transport.registry": "the same",
}
"""Modules outside ``store`` that say such a word and mean something else."""


def _tier_names(tree: ast.Module) -> Iterator[int]:
    """The lines on which a tier of ours is named, as the lineage calls it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in ("local", "memory"):
            yield node.lineno


def test_nobody_outside_the_store_names_a_tier() -> None:
    named = {name: lines for name, (_, tree) in MODULES.items() if (lines := [*_tier_names(tree)])}
    outside = {
        f"{name}:{lines}"
        for name, lines in named.items()
        if not name.startswith("datastates.storage.") and name not in NOT_TIERS
    }
    assert not outside, "ask the tier for its name, or take it from store/tiers.py"
    assert named.keys() >= NOT_TIERS.keys(), "take out those that say it no more"
    assert {name for name in named if name.startswith("datastates.storage.")} == {
        "datastates.storage.local",
        "datastates.storage.memory",
    }


FOREIGN_LOGGERS = {"uvicorn.access"}
"""Loggers of others, whose level or handler we set."""


def _odd_loggers(name: str, tree: ast.Module) -> Iterator[str]:
    """Loggers that a module gets in another way than ``_logger = logging.getLogger(__name__)``."""
    usual = {
        id(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and [*map(ast.unparse, node.targets)] == ["_logger"]
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger")):
            continue
        given = ast.unparse(node.args[0]) if node.args else ""
        is_foreign = given.strip("'") in FOREIGN_LOGGERS
        if not is_foreign and not (id(node) in usual and given == "__name__"):
            yield f"{name}:{node.lineno} gets the logger {given or 'of the root'}"


def test_a_module_logs_under_its_own_name() -> None:
    """Users silence or follow a part of us by its name: ``datastates.transport``,
    ``datastates.api.security``."""
    odd = [said for name, (_, tree) in MODULES.items() for said in _odd_loggers(name, tree)]
    assert not odd, "\n".join(odd)
    logging_ones = [name for name, (_, tree) in MODULES.items() if "_logger" in _defined(tree)]
    loggers: dict[str, logging.Logger] = {
        name: vars(importlib.import_module(name))["_logger"] for name in logging_ones
    }
    assert {name: logger.name for name, logger in loggers.items()} == {
        name: name for name in loggers
    }
    assert len(loggers) > 30


def test_an_odd_logger_is_seen() -> None:
    tree = ast.parse(
        "_logger = logging.getLogger('datastates')\ndef f():\n    logging.getLogger().info('x')\n  "
        "  getLogger('uvicorn.access')"
    )
    assert [*_odd_loggers("here", tree)] == [
        "here:1 gets the logger 'datastates'",
        "here:3 gets the logger of the root",
    ]


def _unexplained(name: str, source: str) -> Iterator[str]:
    """Handlers of every error that do not raise again, and do not say on their line why they
    must be so broad."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ExceptHandler(
                type=None | ast.Name(id="Exception" | "BaseException"), body=body
            ):
                is_broad = not any(isinstance(each, ast.Raise) for each in body)
            case ast.Call(func=ast.Name(id="suppress"), args=args):
                is_broad = any(
                    isinstance(each, ast.Name) and each.id in ("Exception", "BaseException")
                    for each in args
                )
            case _:
                continue
        near = lines[node.lineno - 2 : node.lineno + 1]
        if is_broad and not any("#" in line for line in near):
            yield (
                f"{name}:{node.lineno} keeps every error to itself: narrow it, or say why not beside"
                " it"
            )


def test_whoever_catches_every_error_says_why() -> None:
    silent = [
        said
        for name, (path, _) in MODULES.items()
        for said in _unexplained(name, path.read_text(encoding="utf-8"))
    ]
    assert not silent, "\n".join(silent)


def test_an_unexplained_handler_is_seen() -> None:
    handlers = "except Exception as exc:\n    g(exc)\nexcept:  # as g says\n    g()\n"
    source = f"try:\n    f()\n{handlers}with suppress(KeyError, BaseException):\n    f()"
    assert [said.split()[0] for said in _unexplained("here", source)] == ["here:3", "here:7"]
    assert not [*_unexplained("here", "try:\n    f()\nexcept BaseException:\n    g()\n    raise")]


LEFT_LOCKED = ("Event", "Condition", "Semaphore", "BoundedSemaphore", "Barrier")
"""Of ``threading``, written in Python: a signal handler that raises inside of one leaves its
lock taken for ever."""

OUT_OF_REACH = ("api", "cli", "studies", "testing", "transport")
"""Rooms whose waiting threads belong to a command, a server, a test or a worker: no handler of a
training runs in them."""


def _torn(name: str, tree: ast.AST) -> Iterator[str]:
    """What a module takes of ``threading`` that must not be torn out of by a signal."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="threading"), attr=attr, lineno=line) if (
                attr in LEFT_LOCKED
            ):
                yield (
                    f"{name}:{line} takes threading.{attr}: wait with a Notifier or a Latch"
                    " (datastates/system/threads.py)"
                )
            case ast.ImportFrom(module="threading", names=names, lineno=line):
                yield from (
                    f"{name}:{line} imports {each.name}: write threading.{each.name}"
                    for each in names
                    if each.name in LEFT_LOCKED
                )


def test_no_thread_of_a_training_waits_by_what_an_interrupt_leaves_locked() -> None:
    found = {
        name: tree
        for name, (_, tree) in MODULES.items()
        if name.split(".")[1:2] not in [[each] for each in OUT_OF_REACH]
    }
    assert len(found) > len(MODULES) / 2
    assert not [said for name, tree in found.items() for said in _torn(name, tree)]


def test_what_an_interrupt_leaves_locked_is_seen() -> None:
    source = (
        "import threading\nfrom threading import Event,"
        " Lock\nthreading.Condition()\nthreading.Lock()"
    )
    assert [said.split()[0] for said in _torn("here", ast.parse(source))] == ["here:2", "here:3"]


MOST_PARAMETERS = 8


def _long(name: str, tree: ast.AST) -> Iterator[str]:
    """The functions of a module that take too many parameters, options aside; not those of commands and routes,
    which Typer and FastAPI read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _long(f"{name}.{node.name}", node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            needed = [
                each
                for each, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                if default is None
            ]
            taken = [
                each
                for each in [*node.args.posonlyargs, *node.args.args, *needed]
                if each.arg not in ("self", "cls")
            ]
            is_command = any(
                ast.unparse(each.annotation) == "typer.Context" for each in taken if each.annotation
            )
            is_route = any("routes.add(" in ast.unparse(each) for each in node.decorator_list)
            if len(taken) > MOST_PARAMETERS and not is_command and not is_route:
                yield f"{name}.{node.name}"
            yield from _long(f"{name}.{node.name}", node)


def test_no_function_takes_a_long_list_of_parameters() -> None:
    """Keyword arguments with a default are options: there may be any number."""
    assert not [long for name, (_, tree) in MODULES.items() for long in _long(name, tree)]


def test_a_long_list_of_parameters_is_seen() -> None:
    tree = ast.parse(
        "class A:\n    def f(self, a, b, c, d, *, e, f, g, h): ...\n    def g(self, a, b, c, d, /,"
        " e, *, f, g, h, i): ..."
    )
    assert [*_long("here", tree)] == ["here.A.g"]


TOUCHING = {"cuda", "xpu", "mps", "accelerator", "get_device_module", "Stream", "Event"}
"""What torch has for accelerators."""


def _touches(tree: ast.Module) -> Iterator[int]:
    """The lines on which a device is touched, or a kind of device is named, otherwise than by an
    operator on a tensor."""
    modules = ("torch.cuda", "torch.xpu", "torch.accelerator")
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr, lineno=line) if (
                attr in TOUCHING
            ):
                yield line
            case ast.Attribute(
                attr="is_cuda" | "is_xpu" | "record_stream" | "pin_memory" | "get_device",
                lineno=line,
            ):
                yield line
            case ast.keyword(arg="pin_memory", lineno=line):
                yield line
            case ast.Import(names=names, lineno=line) if any(
                alias.name.startswith(modules) for alias in names
            ):
                yield line
            case ast.ImportFrom(module=str(module), lineno=line) if module.startswith(modules):
                yield line


def test_devices_are_touched_in_one_module_only() -> None:
    touching = {name: lines for name, (_, tree) in MODULES.items() if (lines := [*_touches(tree)])}
    assert touching.pop("datastates.system.devices")
    assert not touching, "ask datastates.system.devices"


def test_every_way_to_touch_a_device_is_seen() -> None:
    ways = [
        "torch.cuda.init()",
        "x.is_cuda",
        "torch.Stream()",
        "torch.empty(3, pin_memory=True)",
        "x.record_stream(s)",
    ]
    ways += [
        "import torch.cuda.graphs",
        "from torch.cuda import Event",
        "torch.accelerator.synchronize()",
    ]
    lines = sorted(_touches(ast.parse("\n".join(ways))))
    assert lines == [*range(1, len(ways) + 1)]
