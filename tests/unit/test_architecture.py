"""The arrows of ARCHITECTURE.md: each module imports only from levels below its own, and only ``comm`` touches MPI."""

import ast

from conftest import ROOT

# From the bottom up. A module may import from lower levels, and from its own level only within a package.
LEVELS = [
    {
        "version",
        "errors",
        "seeds",
        "schedule",
        "faults",
        "kernels",
        "cgroups",
        "supervised",
        "pulse",
        "stop_signals",
        "looks",
        "terminal",
        "plain_files",
        "tree",
        "graph_ends",
        "untouched",
    },
    {"plain_values", "users_code"},
    {"hdf5_files"},
    {
        "hostfile",
        "imports",
        "memory",
        "manifest",
        "state",
        "tensor_file",
        "fleet",
        "plan",
        "simulate",
        "partition",
    },
    {"log_layout"},
    {"log"},
    {"config", "spill", "models", "data", "timeline", "recorder", "coding", "spread", "losses"},
    {"replay"},
    {"batches", "weights", "codec", "device", "optimizer", "defer", "observers", "snapshot", "trace", "figures", "forecast"},
    {"stage", "feed", "report", "logging_observer", "progress", "bits", "outline"},
    {"given", "comm", "survey", "probe", "replicas"},
    {"mates", "problem", "profile", "submodels", "restore", "replication"},
    {"dual_stream", "outcome"},
    {"predictor", "planner", "plan_table"},
    {"latency"},
    {"unmeasured", "recovery", "adapting", "ownership", "job_of_all"},
    {"whatif", "signature", "settle", "surveying", "worker", "controller"},
    {"term", "resuming"},
    {"run", "launch"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def modules() -> dict[str, list[tuple[str, set[str]]]]:
    """Top-level module or package -> (file, what it imports of accept_mpi and of mpi4py)."""
    found: dict[str, list[tuple[str, set[str]]]] = {}
    files = [*(ROOT / "accept_mpi").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        name = "kernels" if parts[0] == "kernels" else parts[1]
        if name == "__init__":
            continue
        imported = set()
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "accept_mpi" else [node.module]
            for imported_name in names:
                if imported_name.startswith("accept_mpi."):
                    imported.add(imported_name.split(".")[1])
                if imported_name.split(".")[0] == "mpi4py":
                    imported.add("mpi4py")
        found.setdefault(name, []).append((str(file.relative_to(ROOT)), imported))
    return found


def test_imports_go_one_way() -> None:
    wrong = []
    for name, files in modules().items():
        assert name in LEVEL, f"{name} has no level here"
        for file, imported in files:
            for other in imported - {name, "mpi4py", "__version__"}:
                if LEVEL[other] >= LEVEL[name]:
                    wrong.append(f"{file} (level {LEVEL[name]}) imports {other} (level {LEVEL[other]})")
    assert not wrong, "\n".join(wrong)


def test_only_comm_touches_mpi() -> None:
    assert [
        name for name, files in modules().items() for _, imported in files if "mpi4py" in imported and name != "comm"
    ] == []


def test_worker_and_controller_do_not_know_each_other() -> None:
    found = modules()
    assert "controller" not in found["worker"][0][1]
    assert "worker" not in found["controller"][0][1]


def test_files_stay_readable() -> None:
    long = {str(f): n for f in (ROOT / "accept_mpi").rglob("*.py") if (n := len(f.read_text().splitlines())) > 420}
    assert not long
