"""``pip install .`` into a new environment: works outside the checkout, and takes nobody else's name."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

from conftest import HANGS, ROOT

OUTSIDE = "import accept_mpi; from accept_mpi.kernels import packing; print(accept_mpi.__file__, packing.__file__)"


def run(*command: object, cwd: Path) -> str:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_install_into_a_new_environment(tmp_path: Path) -> None:
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    run(*wheel, ROOT, cwd=tmp_path)
    (built,) = tmp_path.glob("accept_mpi-*.whl")
    top = {name.split("/")[0] for name in zipfile.ZipFile(built).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"accept_mpi"}
    assert "accept_mpi/kernels/packing.py" in zipfile.ZipFile(built).namelist()

    fresh = tmp_path / "venv"
    venv.create(fresh, with_pip=False)
    python = fresh / "bin" / "python"
    # The dependencies come from the environment that runs this test; the package itself from the wheel.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=tmp_path).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", built, cwd=tmp_path)
    assert str(fresh) in run(python, "-c", OUTSIDE, cwd=tmp_path)
    # From the checkout's own root its folder comes first, and its kernels are found too.
    assert str(ROOT) in run(python, "-c", OUTSIDE, cwd=ROOT)
    assert "--resume DIR" in run(fresh / "bin" / "accept-mpi", "train", "--help", cwd=tmp_path)
    assert run(python, "-c", "import importlib.util as u; print(u.find_spec('kernels'))", cwd=tmp_path).strip() == "None"
