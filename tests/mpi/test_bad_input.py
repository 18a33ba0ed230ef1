"""What the user can mend ends within seconds on every rank with exit code 2 and one sentence, printed once."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import samples
from conftest import HANGS, Finished, finish, mpirun_command

MODELS = """
import torch
from torch import nn
def mismatch(): return [nn.Linear(2, 3), nn.Linear(4, 2), nn.Linear(2, 2)]
def number(**args): return 3
def explodes(): return [nn.Flatten(), nn.Linear(192, 32), Explode(), nn.Linear(32, 10)]
def breaks(): return [nn.Flatten(), Break(), nn.Linear(192, 10)]
class Explode(nn.Module):
    calls = 0
    def forward(self, x):
        Explode.calls += 1
        return x * float("inf") if Explode.calls > 20 else x
class Break(nn.Module):
    calls = 0
    def forward(self, x):
        Break.calls += 1
        if Break.calls > 9 and self.training: raise KeyError("a bug in a layer")
        return x
def vectors():
    return (torch.randn(40, 2), torch.zeros(40).long()), (torch.randn(8, 2), torch.zeros(8).long())
def images(classes): return torch.randn(len(classes), 3, 8, 8), classes
def a_class_too_many(): return images(torch.arange(40) % 11), images(torch.zeros(8).long())
def wide_tests(): return images(torch.arange(40) % 10), (torch.randn(8, 3, 8, 9), torch.zeros(8).long())
def float_tests(): return images(torch.arange(40) % 10), images(torch.zeros(8))
def flat(): return [nn.Flatten(), nn.Linear(192, 16), nn.Linear(16, 10)]
def ends(): raise SystemExit("two\\nlines of \\x1b[31mred")
def detached(output, target): return output.detach().mean()
def adversarial(output, target): return output.mean(), output.square().mean()
def three_classes(output, target): return (output - torch.zeros(3)).mean()
learned = nn.PReLU()
def no_pairs(): return [torch.randn(3, 8, 8)] * 40, [torch.randn(3, 8, 8)] * 8
"""

BROKEN = ["--set", "data.name=bad:ends", "--set", "data.args={}"]  # what is found later
TWO_RANKS = [  # job keys, extra arguments, what is said
    ({}, ["--set", "train.epoch=3"], 'unknown key "train.epoch"; did you mean "epochs"?'),
    ({}, ["--set", "model.name=cnm"], 'model.name: unknown name "cnm"; did you mean "cnn"?'),
    ({}, ["--set", "model.name=bad:number"], "expected an nn.Module or a list of layers, got int"),
    ({}, ["--set", "model.name=nowhere:f"], 'cannot import "nowhere"'),
    ({}, ["--set", "pipeline.cuts=[2,3]"], "makes 3 stages, but there are 2 ranks"),
    ({}, ["--set", "pipeline.cuts=auto", "--set", "pipeline.forward=float7"], 'pipeline.forward: unknown codec "float7"'),
    ({}, ["--set", "pipeline.cuts=auto", "--set", 'pipeline.backward=["bf16"]'], 'cuts = "auto" chooses the boundaries'),
    ({}, ["--set", "pipeline.gradients=float7"], 'pipeline.gradients: unknown codec "float7"'),
    ({}, ["--set", "pipeline.cuts=[9]"], "cuts [9] leave a stage empty"),
    ({}, ["--set", "data.name=cifar10", "--set", 'data.args={path="nope"}'], "no file or directory HERE/nope"),
    ({}, ["--set", "output.directory=/proc/nope", *BROKEN], "output.directory: cannot write to /proc/nope"),
    ({}, ["--set", "output.directory=" + "x" * 300, *BROKEN], "x: File name too long"),
    (
        {},
        ["--set", "output.directory=lost/run", *BROKEN],
        "cannot write to lost/run: lost is a link to nowhere, which is not",
    ),
    ({}, ["--set", "output.directory=bad.py", *BROKEN], "cannot write to bad.py: bad.py is not a directory"),
    ({}, ["--set", "output.directory=bad.py/run", *BROKEN], "cannot write to bad.py/run: bad.py is not a directory"),
    ({}, ["--resume", "nowhere"], "nowhere: neither a checkpoint nor a run with one"),
    ({}, BROKEN, "failed: SystemExit: two lines of \\x1b[31mred"),
    ({}, ["--set", "train.loss=hinge"], 'train.loss: unknown name "hinge"'),
    ({}, ["--set", 'train.metrics=["bad:three_classes"]'], 'train.metrics: "bad:three_classes" cannot take what the model'),
    ({}, ["--set", "train.optimizer.nesterov=true", "--set", "train.optimizer.momentum=0"], "nesterov = true needs"),
]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "bad.py").write_text(MODELS)
    (tmp_path / "lost").symlink_to("nowhere")
    return samples.write_job(tmp_path / "job.toml", samples.CNN)


def said_once(out: str, sentence: str) -> None:
    assert out.count(sentence) == 1, out
    assert "Traceback" not in out, out
    lines = [line for line in out.splitlines() if re.match(r"\W*accept_mpi:", line)]  # mpirun may put something in front
    assert len(lines) == 1, out


@pytest.mark.parametrize(("keys", "arguments", "sentence"), TWO_RANKS, ids=[s[:40] for _, _, s in TWO_RANKS])
def test_one_sentence_exit_code_2(mpirun, tmp_path: Path, job: Path, keys, arguments, sentence: str) -> None:
    done = mpirun(2, "-m", "accept_mpi", "train", job, *arguments, code=2)
    said_once(done.out, sentence.replace("HERE", str(tmp_path)))


def test_a_job_file_whose_name_is_no_text(mpirun, tmp_path: Path, job: Path) -> None:
    """Neither what is said of it nor how long one may wait ends a rank in an error of its own."""
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/j\xff.toml")
    Path(odd).write_bytes(job.read_bytes())
    for_ever = ("--set", "pipeline.timeout=1e300", "--set", "pipeline.startup_timeout=1e300")
    done = mpirun(2, "-m", "accept_mpi", "train", odd, *for_ever, "--set", "train.lr=1e308", code=1)
    assert "the loss is" in done.out, done.out
    said_once(
        mpirun(2, "-m", "accept_mpi", "train", odd, "--set", "train.steps=0", code=2).out, r"j\udcff.toml: train.steps"
    )


def test_no_job_file(mpirun, tmp_path: Path) -> None:
    said_once(mpirun(2, "-m", "accept_mpi", "train", "no.toml", code=2).out, "no.toml: cannot read the job file")


def test_more_ranks_than_layers(mpirun, tmp_path: Path, job: Path) -> None:
    said_once(
        mpirun(
            4, "-m", "accept_mpi", "train", job, "--set", "model.name=bad:mismatch", "--set", "model.args={}", code=2
        ).out,
        "4 stages for a model of 3 layers",
    )


def test_layers_that_do_not_fit(mpirun, tmp_path: Path, job: Path) -> None:
    model = ("--set", "model.name=bad:mismatch", "--set", "model.args={}")
    vectors = ("--set", "data.name=bad:vectors", "--set", "data.args={}")
    done = mpirun(3, "-m", "accept_mpi", "train", job, *model, *vectors, code=2)
    said_once(done.out, 'layer 1 "1" cannot take what the layer before gives ((5, 3) float32)')


def test_layers_that_do_not_fit_the_data(mpirun, tmp_path: Path, job: Path) -> None:
    done = mpirun(2, "-m", "accept_mpi", "train", job, "--set", "data.name=text", "--set", "data.args={limit=9999}", code=2)
    said_once(done.out, 'layer 0 "conv1" cannot take')


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("data.name=bad:a_class_too_many", "IndexError: Target 10 is out of bounds"),
        ("data.name=bad:no_pairs", "under one of labels, label, targets, target; got a Tensor"),
        ("train.loss=mse", 'train.loss: "mse" cannot take outputs (5, 10) float32 and targets (5,) int64'),
        ("train.loss=bad:detached", 'train.loss: "bad:detached" gives a loss without a gradient'),
        ("train.loss=bad:adversarial", "it gives two values that need gradients"),
        ("train.loss=bad:learned", 'train.loss: "bad:learned" has parameters of its own'),
    ],
)
def test_data_that_do_not_fit_the_loss(mpirun, tmp_path: Path, job: Path, key: str, sentence: str) -> None:
    args = ["--set", "data.args={}"] if key.startswith("data") else []
    done = mpirun(2, "-m", "accept_mpi", "train", job, "--set", key, *args, code=2)
    said_once(done.out, sentence)


@pytest.mark.parametrize("cuts", ["auto", "[2]"])
@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("wide_tests", 'layer 1 "1" cannot take'),
        ("float_tests", "cannot take outputs (5, 10) float32 and targets (5,) float32"),
    ],
)
def test_a_test_set_that_cannot_be_evaluated(mpirun, job: Path, cuts: str, data: str, sentence: str) -> None:
    """It is told before the first step, not after an epoch."""
    keys = (f"data.name=bad:{data}", "data.args={}", "model.name=bad:flat", "model.args={}", f"pipeline.cuts={cuts}")
    done = mpirun(2, "-m", "accept_mpi", "train", job, *(word for key in keys for word in ("--set", key)), code=2)
    said_once(done.out, "data.name: the test set cannot be evaluated: ")
    assert sentence in done.out
    assert "step 1" not in done.out


def test_resuming_another_model_or_a_damaged_checkpoint(mpirun, tmp_path: Path, job: Path) -> None:
    def resume(*keys: str) -> str:
        more = [word for key in keys for word in ("--set", key)]
        return mpirun(2, "-m", "accept_mpi", "train", job, "--resume", "run", *more, code=2).out

    mpirun(2, "-m", "accept_mpi", "train", job)
    held = '"conv1.conv.weight" as float32 (8, 3, 3, 3), this model has float32 (4, 3, 3, 3)'
    said_once(resume("model.args.width=4", "train.steps=9"), f"the checkpoint holds {held}")
    said_once(resume("model.name=vgg11", "model.args={}", "train.steps=9"), "holds another model (cnn, 8 layers)")
    said_once(resume(), "is at step 6, and the job ends at step 6")
    weights = tmp_path / "run" / "checkpoints" / "step-00000006" / "stage-1.weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    said_once(resume("train.steps=9"), "stage-1.weights.safetensors: does not match its checksum")


def test_non_finite_loss_names_step_and_layer(mpirun, tmp_path: Path, job: Path) -> None:
    """Exit code 1; the layer is found on another stage than the one that sees the loss."""
    model = ("--set", "model.name=bad:explodes", "--set", "model.args={}", "--set", "train.evaluate_every=0")
    done = mpirun(4, "-m", "accept_mpi", "train", job, *model, code=1)
    assert done.out.count("the loss is") == 1, done.out
    assert "in step 5" in done.out, done.out
    assert 'the first values that are not finite come out of layer 2 "2"' in done.out, done.out


def test_a_layer_far_into_a_long_chain_is_named(trained, tmp_path: Path) -> None:
    """From layer 4,096 on its number was taken for flags: the step ended with an unwanted checkpoint, or with the plan."""
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Breaks(nn.Module):\n    def forward(self, x):\n        return x / 0\n"
        "def model():\n    return [nn.Linear(6, 3), *(nn.Identity() for _ in range(4199)), Breaks(), nn.Identity()]\n"
        "def data():\n    pairs = (torch.ones(8, 6), torch.zeros(8, dtype=torch.int64))\n    return pairs, pairs\n"
    )
    (tmp_path / "job.toml").write_text(
        '[model]\nname = "net:model"\n[data]\nname = "net:data"\n[train]\nbatch_size = 4\nmicro_batches = 2\nsteps = 3\n'
        'evaluate_every = 0\n[pipeline]\ncuts = [4201]\n[output]\ndirectory = "run"\n'
    )
    (done,) = trained(2, tmp_path, ["job.toml"], code=1)
    assert 'the first values that are not finite come out of layer 4200 "4200"' in done.out, done.out
    assert "step 1, micro-batch 0" in done.out, done.out
    assert not list(tmp_path.glob("run/checkpoints/step-*")), done.out


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bug_shows_its_traceback_once(mpirun, tmp_path: Path, job: Path, rank: int) -> None:
    model = ("--set", "model.name=bad:breaks", "--set", "model.args={}", "--set", f"pipeline.cuts=[{2 - rank}]")
    done = mpirun(2, "-m", "accept_mpi", "train", job, *model, code=1)
    assert done.out.count("KeyError: 'a bug in a layer'") == 1, done.out
    assert f"rank {rank} on host" in done.out
    assert f"(stage {rank}, layers" in done.out
    assert 'in step 2: layer 1 "1" raised:' in done.out


def mixed(tmp_path: Path, first: list[str], second: list[str]) -> Finished:
    """One rank each of two different command lines."""
    command = [*mpirun_command(1), sys.executable, *first, ":", "-n", "1", sys.executable, *second]
    return finish(command, tmp_path, {}, HANGS)


def test_different_versions(tmp_path: Path, job: Path) -> None:
    code = (
        "import accept_mpi.version as v, sys; v.__version__ = '9.9'\n"
        f"from accept_mpi.cli import main; main(['train', {str(job)!r}])"
    )
    done = mixed(tmp_path, ["-m", "accept_mpi", "train", str(job)], ["-c", code])
    assert done.code == 2, done.out
    said_once(done.out, "versions of accept_mpi and torch differ between hosts")


OTHER_BUILD = "import accept_mpi.device.facts as f; old = f.version; f.version = lambda name: old(name) + '+pi'\n"


def test_other_builds_of_one_version_go_together(tmp_path: Path, job: Path) -> None:
    """Such as torch 2.13.0 and 2.13.0+cpu: which of them pip finds differs between kinds of machines."""
    code = f"{OTHER_BUILD}import sys; from accept_mpi.cli import main; sys.exit(main(['train', {str(job)!r}]))"
    done = mixed(tmp_path, ["-m", "accept_mpi", "train", str(job)], ["-c", code])
    assert done.code == 0, done.out


def test_doctor_warns_of_different_versions(tmp_path: Path) -> None:
    code = "import accept_mpi.version as v; v.__version__ = '9.9'\n" + OTHER_BUILD
    code += "from accept_mpi.cli import main; main(['doctor'])"
    done = mixed(tmp_path, ["-m", "accept_mpi", "doctor"], ["-c", code])
    assert done.code == 0, done.out
    assert "on the version of torch" not in done.out
    assert "WARNING: hosts disagree on the version of accept_mpi" in done.out


def test_ranks_that_read_different_job_files(tmp_path: Path, job: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    samples.write_job(other / "job.toml", samples.CNN, train_steps=99)
    code = f"import os; os.chdir({str(other)!r})\nfrom accept_mpi.cli import main; main(['train', 'job.toml'])"
    done = mixed(tmp_path, ["-m", "accept_mpi", "train", "job.toml"], ["-c", code])
    assert done.code == 2, done.out
    said_once(done.out, "job.toml: differs from rank 0's file")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_full_disk_ends_with_one_sentence(mpirun, tmp_path: Path, job: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(small)], check=True)
    try:
        keys = ("--set", "output.directory=small/run", "--set", "output.checkpoint_every=1", "--set", "output.keep=0")
        done = mpirun(2, "-m", "accept_mpi", "train", job, *keys, "--set", "train.steps=200", code=2)
        assert "No space left on device" in done.out, done.out
        assert done.out.count("accept_mpi:") == 1, done.out
    finally:
        subprocess.run(["umount", str(small)], check=True)
