"""Which code hosts compare: the user's and this program's, not libraries'."""

import sys
from pathlib import Path

import pytest

from accept_mpi.users_code import sources


def test_the_users_modules_and_this_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_code_one.py").write_text("import my_code_two\n")
    (tmp_path / "my_code_two.py").write_text("x = 1\n")
    __import__("my_code_one")
    before = sources()
    assert {"my_code_one", "my_code_two", "accept_mpi.users_code"} <= set(before)
    assert not {"os", "json", "torch", "torch.nn", "numpy", "msgspec", "pytest", "__main__"} & set(before)
    (tmp_path / "my_code_two.py").write_text("x = 2\n")  # what has been imported does not change
    assert sources()["my_code_two"] == before["my_code_two"]
    for name in ("my_code_one", "my_code_two"):
        del sys.modules[name]
