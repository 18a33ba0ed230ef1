"""The rule of ARCHITECTURE.md: imports point down this list, never up, and never sideways on a line; nor in a circle."""

import ast
from pathlib import Path

from conftest import ROOT

# From the top down. "." is accept_mpi/ itself: the shared words, with files/ beside them.
FLOORS = """
    cli
    training
    recovery
    planning  comm  prediction  launch
    profiling  logs
    pipeline
    codecs  data  models
    device  kernels
    .  files
"""
HEIGHT = {room: -n for n, line in enumerate(FLOORS.split("\n")) for room in line.split()}
SHARED = {".", "files"}


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = ("accept_mpi", *parts) if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(f): f for top in ("accept_mpi", "kernels") for f in sorted((ROOT / top).rglob("*.py"))}


def room_of(module: str) -> str:
    name = [*module.split("."), ""][1]
    return name if name in HEIGHT else "."


def imported(file: Path) -> set[str]:
    """Modules of ours that a file imports, anywhere in it, and "mpi4py"."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            assert not node.level, f"{file}: a relative import"
            names = [name if (name := f"{module}.{a.name}") in FILES else module for a in node.names]
        found |= {name for name in names if name in FILES} | {"mpi4py" for name in names if name.split(".")[0] == "mpi4py"}
    return found


IMPORTS = {module: imported(file) for module, file in FILES.items()}


def test_every_room_has_its_floor() -> None:
    rooms = {folder.name for folder in (ROOT / "accept_mpi").iterdir() if folder.is_dir() and folder.name[0] != "_"}
    assert rooms | {".", "kernels"} == set(HEIGHT)


def test_imports_point_down() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in others - {"mpi4py"}
        if module not in ("accept_mpi", "accept_mpi.__main__")  # the front doors
        if (here := room_of(module)) != (there := room_of(other))
        if HEIGHT[there] >= HEIGHT[here] and not {here, there} <= SHARED
    ]
    assert not wrong, "\n".join(wrong)


def test_no_imports_in_a_circle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for other in sorted(IMPORTS[module] - {"mpi4py"}):
                visit(other, (*path, module))
            done.add(module)

    for module in IMPORTS:
        visit(module, ())


def test_only_comm_touches_mpi() -> None:
    assert {room_of(module) for module, others in IMPORTS.items() if "mpi4py" in others} == {"comm"}


def test_worker_and_controller_do_not_know_each_other() -> None:
    worker, controller = "accept_mpi.training.worker", "accept_mpi.training.controller"
    assert controller not in IMPORTS[worker]
    assert worker not in IMPORTS[controller]


def test_files_stay_readable() -> None:
    assert not {module: n for module, file in FILES.items() if (n := len(file.read_text().splitlines())) > 420}


def test_threads_are_had_not_inherited() -> None:
    """Fields of a class of ours had names that ``threading.Thread`` took for its own in Python 3.13: no run began."""
    classes = [
        node for file in FILES.values() for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)
    ]
    assert not [one.name for one in classes if any("Thread" in ast.unparse(base) for base in one.bases)]


def test_test_files_have_names_of_their_own() -> None:
    """pytest takes them by name alone: a second one of a name is not collected where the whole suite runs."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
