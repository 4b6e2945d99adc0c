"""The structure of ``shoal``, read from its source: which part may import which, and what no part may do.

Every rule is a function from files (path → text) to findings (``path:line: what breaks which rule``). Each is run on
the package, and on small made-up packages that break it, so that none can pass by looking at nothing.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

# A part (a folder or plain file of shoal/) imports itself and the parts of lower tiers. Within a tier, the parts import
# each other without cycles ("acyclic") or not at all ("apart").
TIERS = (
    ("apart", {"errors"}),
    ("acyclic", {"layout", "config", "purposes", "sizes"}),
    ("acyclic", {"model", "optim", "data", "placement", "local", "mesh", "comm", "meter", "storage", "trace"}),
    ("apart", {"pipeline", "data_parallel", "tensor", "context", "expert", "memory", "checkpoint"}),
    ("acyclic", {"build", "own", "feed", "flow", "behind", "load", "overlap", "result"}),
    ("apart", {"engine"}),
    ("apart", {"train"}),
    ("apart", {"cli"}),
)
READERS = {"plan", "report"}  # read every tier below `train`; imported by `cli` alone

TORCH_FREE = {  # these, and what they import when imported, start without torch
    *("shoal.cli", "shoal.layout", "shoal.config", "shoal.errors", "shoal.optim.schedule", "shoal.plan.search"),
    *("shoal.pipeline.program", "shoal.pipeline.schedules", "shoal.pipeline.simulate"),
    *("shoal.pipeline.lower", "shoal.pipeline.faults", "shoal.pipeline.stages"),
    *("shoal.pipeline.stream", "shoal.pipeline.versions", "shoal.memory.account", "shoal.purposes"),
}
BRINGS_TORCH = {"torch", "safetensors.torch"}

MAY_PRINT = {"cli", "report"}
MAY_READ_ENVIRONMENT = {"cli", "train", "comm.world"}
UNPICKLING_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
UNPICKLING_CALLS = {"torch.load", "torch.distributed.all_gather_object", "torch.distributed.gather_object"}
UNPICKLING_CALLS |= {f"torch.distributed.{verb}_object_list" for verb in ("broadcast", "scatter", "send", "recv")}
MAX_LINES = 400

Files = Mapping[str, str]
Findings = list[str]
ROOT = Path(__file__).parents[1]


class Import(NamedTuple):
    """One imported name: ``target`` is dotted; ``at_start`` when importing the module runs it."""

    line: int
    target: str
    at_start: bool


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _modules(files: Files) -> dict[str, str]:
    """The modules of shoal: name → path."""
    return {_module(path): path for path in files if path.startswith("shoal/")}


def _part(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _within(module: str, names: set[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name | ast.Attribute) and ast.unparse(test).endswith("TYPE_CHECKING")


def _statements(node: ast.AST, at_start: bool = True) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import statement, and whether importing the module runs it."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, at_start
    elif isinstance(node, ast.If) and _is_type_checking(node.test):
        for guarded in node.body:
            yield from _statements(guarded, False)
        for other in node.orelse:
            yield from _statements(other, at_start)
    else:
        inside = at_start and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from _statements(child, inside)


def _imports(path: str, text: str) -> Iterator[Import]:
    """Every name a file imports, anywhere in it, relative ones made absolute."""
    package = _module(path).split(".")[: None if path.endswith("/__init__.py") else -1]
    for node, at_start in _statements(_parsed(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + node.module.split(".") if node.module else base
            names = [".".join([*base, alias.name]) for alias in node.names]
        for name in names:
            yield Import(node.lineno, name, at_start)


def _home(target: str, modules: Mapping[str, str]) -> str:
    """The module of shoal that ``target``, a module or a name in one, belongs to."""
    while target not in modules and target != "shoal":
        target = target.rpartition(".")[0]
    return target


def _tier(part: str) -> int | None:
    return next((at for at, (_, parts) in enumerate(TIERS) if part in parts), None)


def _against_the_tiers(part: str, other: str) -> str | None:
    """Why ``part`` may not import ``other``, or None; cycles within a tier are looked for elsewhere."""
    if part == other or part == "cli":
        return None
    if other in READERS:
        return f"only cli imports {other}"
    own, its = _tier(part), _tier(other)
    if its is None:
        return f"'{other}' has no tier: give it one in TIERS"
    if part in READERS:
        return None if TIERS[its][1].isdisjoint({"train", "cli"}) else f"{part} reads only what is below train"
    assert own is not None
    if its > own:
        return f"{other} is above {part}"
    return f"{part} and {other} are siblings" if its == own and TIERS[own][0] == "apart" else None


def imports_run_one_way(files: Files) -> Findings:
    """Type-checking and in-function imports count too; ``shoal/__init__.py``, the face of it all, is exempt."""
    modules = _modules(files)
    found, edges = [], dict[tuple[str, str], str]()
    for module, path in modules.items():
        if module == "shoal":
            continue
        part = _part(module)
        if part not in READERS and _tier(part) is None:
            found.append(f"{path}:1: imports run one way: '{part}' has no tier: give it one in TIERS")
            continue
        for item in _imports(path, files[path]):
            if item.target.split(".")[0] != "shoal" or item.target == "shoal.__version__":
                continue
            at = f"{path}:{item.line}"
            other = _part(_home(item.target, modules))
            if not other:
                found.append(f"{at}: imports run one way: take {item.target} from the module that defines it")
            elif broken := _against_the_tiers(part, other):
                found.append(f"{at}: imports run one way: {broken}")
            elif part != other:
                edges.setdefault((part, other), at)
    graph: dict[str, set[str]] = {}
    for part, other in edges:
        graph.setdefault(part, set()).add(other)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        ring = error.args[1][::-1]  # each imports the next
        found.append(f"{edges[ring[0], ring[1]]}: imports run one way: {' → '.join(ring)} is a cycle")
    return found


def light_modules_start_without_torch(files: Files) -> Findings:
    """Follows what runs on import: module-level imports, and the ``__init__`` of every enclosing package."""
    modules = _modules(files)
    found = []
    for start in sorted(module for module in modules if _within(module, TORCH_FREE)):
        chains: list[tuple[str, ...]] = [(start,)]
        seen = {start}
        while chains:
            chain = chains.pop(0)
            path = modules[chain[-1]]
            reached = [".".join(chain[-1].split(".")[:n]) for n in range(1, chain[-1].count(".") + 1)]
            for item in _imports(path, files[path]):
                if item.at_start and _within(item.target, BRINGS_TORCH):
                    way = " → ".join(chain)
                    found.append(f"{path}:{item.line}: {start} starts without torch: {way} imports {item.target}")
                elif item.at_start and item.target.split(".")[0] == "shoal":
                    reached.append(_home(item.target, modules))
            for module in reached:
                if module in modules and module not in seen:
                    seen.add(module)
                    chains.append((*chain, module))
    return found


def _names(text: str) -> dict[str, str]:
    """What each imported name of a file stands for: ``dist`` → ``torch.distributed``."""
    names: dict[str, str] = {}
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _uses(text: str) -> Iterator[tuple[ast.expr, str]]:
    """Every name and dotted name a file mentions, spelled in full: ``dist.send`` is ``torch.distributed.send``."""
    names = _names(text)
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.Name | ast.Attribute):
            first, dot, rest = ast.unparse(node).partition(".")
            yield node, (names.get(first, first) + dot + rest).removeprefix("builtins.")


def only_cli_and_report_print(files: Files) -> Findings:
    """A call or a mention (as in ``map(print, ...)``) of the built-in, or of rich's."""
    return [
        f"{path}:{node.lineno}: nothing below cli prints: {name}"
        for module, path in _modules(files).items()
        if _part(module) not in MAY_PRINT
        for node, name in _uses(files[path])
        if name in {"print", "rich.print"}
    ]


def the_environment_is_read_at_the_top(files: Files) -> Findings:
    """``os.environ[...] = value`` reads nothing and may stand."""
    found = []
    for module, path in _modules(files).items():
        if _within(module, {f"shoal.{name}" for name in MAY_READ_ENVIRONMENT}):
            continue
        written = {
            id(node.value)
            for node in ast.walk(_parsed(files[path]))
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        }
        for node, name in _uses(files[path]):
            if name in {"os.environ", "os.environb", "os.getenv", "os.getenvb"} and id(node) not in written:
                rule = "nothing below train reads the environment, but shoal/comm/world.py"
                found.append(f"{path}:{node.lineno}: {rule}: {name}")
    return found


def nothing_unpickles_or_evaluates(files: Files) -> Findings:
    """No pickle in any dress (``torch.load``, collectives of objects, ``allow_pickle``), no ``eval``, no ``exec``."""
    found = []
    for path in _modules(files).values():
        rule = "data never runs as code"
        for item in _imports(path, files[path]):
            if _within(item.target, UNPICKLING_MODULES):
                found.append(f"{path}:{item.line}: {rule}: {item.target}")
        for node, name in _uses(files[path]):
            if name in {"eval", "exec"} | UNPICKLING_CALLS:
                found.append(f"{path}:{node.lineno}: {rule}: {name}")
        for given in ast.walk(_parsed(files[path])):
            if isinstance(given, ast.keyword) and given.arg == "allow_pickle" and ast.unparse(given.value) != "False":
                found.append(f"{path}:{given.value.lineno}: {rule}: allow_pickle")
    return found


def files_are_short(files: Files) -> Findings:
    """A longer file holds two ideas."""
    return [
        f"{path}:{lines}: no file is over {MAX_LINES} lines: it has {lines}"
        for path, text in files.items()
        if (lines := len(text.splitlines())) > MAX_LINES
    ]


def public_modules_say_what_they_are(files: Files) -> Findings:
    """An empty ``__init__.py`` has nothing to say."""
    return [
        f"{path}:1: every public module has a docstring"
        for module, path in _modules(files).items()
        if not module.rpartition(".")[2].startswith("_") and files[path].strip()
        if not ast.get_docstring(_parsed(files[path]))
    ]


RULES: tuple[Callable[[Files], Findings], ...] = (
    imports_run_one_way,
    light_modules_start_without_torch,
    only_cli_and_report_print,
    the_environment_is_read_at_the_top,
    nothing_unpickles_or_evaluates,
    files_are_short,
    public_modules_say_what_they_are,
)


@pytest.fixture(scope="module")
def files() -> Files:
    paths = sorted(path for folder in ("shoal", "tests", "bench") for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@pytest.mark.parametrize("rule", RULES)
def test_shoal_keeps_the_rule(rule: Callable[[Files], Findings], files: Files) -> None:
    assert "shoal/errors.py" in files
    assert not (found := rule(files)), "\n" + "\n".join(found)


def test_light_modules_leave_torch_unloaded_in_a_fresh_process(files: Files) -> None:
    light = sorted(module for module in _modules(files) if _within(module, TORCH_FREE))
    assert {"shoal.layout", "shoal.config", "shoal.pipeline.program", "shoal.optim.schedule"} <= set(light)
    code = (
        "import importlib, sys\n"
        f"for module in {light}:\n"
        "    importlib.import_module(module)\n"
        "    assert 'torch' not in sys.modules, f'{module} brings torch with it'"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


ONE_WAY, NO_TORCH = imports_run_one_way, light_modules_start_without_torch
CALLS, ENVIRONMENT = only_cli_and_report_print, the_environment_is_read_at_the_top
CODE = nothing_unpickles_or_evaluates


@pytest.mark.parametrize(
    ("rule", "package", "finding"),
    [
        (ONE_WAY, {"model/a": "\nimport shoal.engine"}, "shoal/model/a.py:2: imports run .*engine is above model"),
        (ONE_WAY, {"mesh": "def f():\n    from shoal.train import loop"}, "shoal/mesh.py:2: .*train is above mesh"),
        (ONE_WAY, {"tensor/a": "from ..memory.b import c"}, "tensor/a.py:1: .*tensor and memory are siblings"),
        (ONE_WAY, {"expert/a": "if TYPE_CHECKING:\n    from shoal import context"}, "expert and context are siblings"),
        (ONE_WAY, {"plan/a": "import shoal.train.loop"}, "plan reads only what is below train"),
        (ONE_WAY, {"report/a": "import shoal.plan.cost"}, "only cli imports plan"),
        (ONE_WAY, {"train/a": "from shoal.report.b import c"}, "only cli imports report"),
        (ONE_WAY, {"mesh": "import shoal.comm.a", "comm/a": "import shoal.mesh"}, r"py:1: .*(mesh → comm|comm → mesh)"),
        (ONE_WAY, {"engine": "from shoal import Layout"}, "take shoal.Layout from the module that defines it"),
        (ONE_WAY, {"stray": ""}, "shoal/stray.py:1: .*'stray' has no tier"),
        (NO_TORCH, {"config": "from torch import Tensor"}, "config.py:1: .*shoal.config imports torch.Tensor"),
        (NO_TORCH, {"cli": "import shoal.mesh", "mesh": "import torch"}, "mesh.py:1: .*shoal.cli → shoal.mesh imports"),
        (NO_TORCH, {"optim/__init__": "import torch", "optim/schedule": ""}, "optim/__init__.py:1: .*without torch"),
        (NO_TORCH, {"errors": "try:\n    import safetensors.torch\nfinally:\n    pass"}, "errors.py:2"),
        (CALLS, {"engine": "\n\nprint(1)"}, "shoal/engine.py:3: nothing below cli prints"),
        (CALLS, {"train/a": "from rich import print as say\nsay(1)"}, "a.py:2: .*rich.print"),
        (ENVIRONMENT, {"engine": "import os as o\no.environ.get('A')"}, "engine.py:2: .*os.environ"),
        (ENVIRONMENT, {"comm/a": "from os import getenv\ngetenv('A')"}, "comm/a.py:2: .*os.getenv"),
        (CODE, {"cli": "import pickle"}, "cli.py:1: data never runs as code: pickle"),
        (CODE, {"cli": "import torch as t\nt.load('f')"}, "cli.py:2: .*torch.load"),
        (CODE, {"cli": "import torch.distributed as d\nd.broadcast_object_list([])"}, "broadcast_object_list"),
        (CODE, {"cli": "eval('1')"}, "cli.py:1: .*eval"),
        (CODE, {"cli": "import numpy as np\nnp.load('f', allow_pickle=True)"}, "cli.py:2: .*allow_pickle"),
        (files_are_short, {"mesh": "a = 1\n" * 401}, "shoal/mesh.py:401: no file is over 400 lines: it has 401"),
        (public_modules_say_what_they_are, {"mesh": "a = 1"}, "shoal/mesh.py:1: every public module has a docstring"),
    ],
)
def test_a_package_that_breaks_the_rule_is_found(
    rule: Callable[[Files], Findings], package: dict[str, str], finding: str
) -> None:
    found = rule(_made_up(package))
    assert len(found) == 1
    assert re.search(finding, found[0]), found


@pytest.mark.parametrize("rule", RULES)
def test_a_package_that_keeps_every_rule_is_left_alone(rule: Callable[[Files], Findings]) -> None:
    package = {
        "cli": "import os\nif TYPE_CHECKING:\n    import torch\ndef f():\n    import torch, shoal.plan\n    print(os)",
        "train/a": "from shoal import __version__\nimport os\nfrom shoal.engine import b\nos.getenv('A')",
        "engine": "import torch\nimport os\nos.environ['A'] = 'b'\nmodel.eval()\nconsole.print(1)",
        "plan/a": "import shoal.engine",
        "comm/world": "import os\nos.environ['A']",
        "mesh": "from .comm.world import C",
        "layout/rules": "from shoal.layout import kinds\nfrom shoal.errors import LayoutError",
        "errors": "",
    }
    assert rule(_made_up({name: f'"""Says."""\n{text}' for name, text in package.items()})) == []


def _made_up(package: Mapping[str, str]) -> Files:
    """A package of these modules, and an empty one for each other part, so that every import finds its home."""
    parts = {part for _, parts in TIERS for part in parts} | READERS | {""}
    files = {f"shoal/{part}/__init__.py".replace("//", "/"): "" for part in parts if part not in package}
    return files | {f"shoal/{name}.py": text for name, text in package.items()}
