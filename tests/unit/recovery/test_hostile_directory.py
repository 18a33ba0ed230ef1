"""A run's directory in which somebody else has left what does not belong there: a result, or one sentence before step 1."""

import os
from pathlib import Path

import pytest

from accept_mpi.errors import UserError
from accept_mpi.recovery.checkpoint import BEST, best_of
from accept_mpi.training.best import Best
from accept_mpi.training.run_log import prepare_directory


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"step": 1e999}', '{"step": []}', "[1]", "1", "\xff", '{"step": 1' + "0" * 9999 + "}"]
)
def test_a_best_checkpoint_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / BEST).write_text(text, "latin-1")
    with pytest.raises(UserError, match="has kept no best checkpoint"):
        best_of(tmp_path)
    assert Best(tmp_path, "new", "loss", None, {"new": 9}, lambda text: None).at is None


def test_a_best_checkpoint_in_a_pipe_or_a_device(tmp_path: Path) -> None:
    """A pipe that nobody writes to is not waited for, and a device without an end not read."""
    (tmp_path / "checkpoints").mkdir()
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(tmp_path / BEST)
        with pytest.raises(UserError, match="has kept no best checkpoint"):
            best_of(tmp_path)
        assert Best(tmp_path, "new", "loss", None, {"new": 9}, lambda text: None).at is None
        (tmp_path / BEST).unlink()


def test_a_directory_is_tried_before_the_first_step(tmp_path: Path) -> None:
    """With its folder of checkpoints, which an earlier run may have left to somebody else."""
    os.mkfifo(tmp_path / ".writable")
    kept = tmp_path / "kept"
    kept.write_text("kept")
    prepare_directory(tmp_path)
    (tmp_path / ".writable").symlink_to(kept)
    prepare_directory(tmp_path)
    assert kept.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
    for left in ("file", "link"):
        folder = tmp_path / "checkpoints"
        folder.write_text("") if left == "file" else folder.symlink_to("nowhere")
        with pytest.raises(
            UserError, match=r"cannot write to .*checkpoints: .* is (not a directory|a link to nowhere, which)"
        ):
            prepare_directory(tmp_path)
        folder.unlink()
