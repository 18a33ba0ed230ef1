"""Sparse gradients (``nn.Embedding(sparse=True)``): what torch takes of them trains; what it refuses in the first update is
told before it."""

from pathlib import Path

NET = """
import torch
from torch import nn

def model(tied=False):
    words, head = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 20, bias=False)
    if tied:
        head.weight = words.weight
    return nn.Sequential(words, nn.Linear(8, 8), nn.Tanh(), head)

def data():
    x = torch.randint(0, 20, (24,))
    return (x, (x + 1) % 20), (x[:8], (x[:8] + 1) % 20)
"""
JOB = """
model.name = "net:model"
data.name = "net:data"
train = { steps = 2, batch_size = 8, micro_batches = 2 }
pipeline = { cuts = [2], probe_seconds = 0.1, latency_db = "none" }
output.directory = "run"
"""
REFUSED = "0.weight has a sparse gradient (sparse=True), which train.optimizer.name"
CASES = [  # keys, and what is said; nothing: it trains
    (["train.optimizer.momentum=0.9"], ""),
    (["pipeline.schedule=1f1b-async"], ""),
    (["train.optimizer.name=adam"], f'{REFUSED} = "adam"'),
    (["train.optimizer.name=adam", "pipeline.cuts=auto"], f'{REFUSED} = "adam"'),
    (["train.clip_norm=1.0"], f'{REFUSED} = "sgd"'),
    (["train.groups=[{names=['0.*'], weight_decay=0.1}]"], f'{REFUSED} = "sgd"'),
    (["model.args={tied=true}"], "with a sparse gradient (sparse=True), so no cut may part them"),
    (["model.args={tied=true}", "pipeline.cuts=[]", "pipeline.ranks=[0]"], ""),
]


def test_they_train_or_are_refused_before_the_first_step(trained, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "job.toml").write_text(JOB)
    found = trained(2, tmp_path, [("job.toml", *keys) for keys, _ in CASES], code=None)
    for (keys, said), done in zip(CASES, found, strict=True):
        assert done.code == (2 if said else 0), f"{keys}\n{done.out}"
        assert done.out.count(said) == 1 if said else "step 2  done" in done.out, f"{keys}\n{done.out}"
        assert not said or "step 1/" not in done.out
