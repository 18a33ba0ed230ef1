"""Times of sub-models of four models on two dozen devices: the data of the predictor's and the partitioner's experiments.

A device is a host of the lab (share of a core x threads x instruction set) with a memory format. Data are measured in the
lab, or come from data.h5 in the predictor's folder, which an earlier run left there.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from accept_mpi.codecs.tensors import TensorSpec
from accept_mpi.data import load as load_data
from accept_mpi.device.fleet import Host
from accept_mpi.job_file import parse
from accept_mpi.models import load as load_model
from accept_mpi.prediction.samples import DeviceSamples
from accept_mpi.profiling.layer_timer import micro_batch
from accept_mpi.profiling.outline import Outline, outline_of
from harness.experiment import Experiment

Floats = npt.NDArray[np.float64]

JOB = Path(__file__).resolve().parent.parent / "experiments" / "predictor" / "job.toml"
MODELS: dict[str, list[str]] = {
    "mobilenetv2": [],
    "resnet18": ["model.name=resnet18", "model.args={ classes = 10 }", "data.args={ size = 8 }"],
    "vgg11": ["model.name=vgg11", "model.args={ classes = 10 }", "train.batch_size=1"],
    "gpt": [
        "model.name=gpt", "model.args={ layers = 4, width = 128, context = 64, heads = 4 }",
        "data.name=text", "data.args={ context = 64, limit = 20000 }",
    ],
}  # fmt: skip
FORMATS = ("channels_last", "contiguous")
ISAS = ("default", "avx2", "avx512")
SHARES = (0.5, 0.7, 1.0)  # of a core, one thread; two of 1.8 cores
COUNT = 16  # sub-models, not counting the probes


def host_of(share: float, isa: str) -> Host:
    """A host with one thread and this share of a core."""
    return Host(f"cpu{round(100 * share)}", share, 1, isa)


def device_of(isa: str, host: Host, kind: str) -> str:
    """Name of a device in the data; ``kind``: its memory format."""
    return f"{isa} {host.name} {kind}"


def fleets() -> dict[str, list[Host]]:
    """Hosts by fleet, few enough per fleet that each gets a core of the machine."""
    found = {}
    for isa in ISAS:
        first, second, third = (host_of(share, isa) for share in SHARES)
        found[f"{isa}-a"] = [first, third]
        found[f"{isa}-b"] = [second]
        found[f"{isa}-c"] = [Host("two", 1.8, 2, isa)]
    return found


class Gathered(NamedTuple):
    """Measurements of one model on one device."""

    model: str
    known: DeviceSamples
    passes: Floats
    """(sub-models, 2) seconds of each of ``known.intervals``: in the even visits and in the odd ones."""


def gathered(experiment: Experiment) -> list[Gathered]:
    """Measurements of all models on all devices."""
    _take_kept(experiment)
    outlines = {(name, kind): _outline(settings, kind) for name, settings in MODELS.items() for kind in FORMATS}
    data = []
    for fleet, hosts in fleets().items():
        with experiment.fleet(fleet, hosts):
            for (name, kind), model in outlines.items():
                asked = {"job": str(JOB), "set": [*MODELS[name], f"train.memory_format={kind}"], "count": COUNT}
                found = experiment.measure("submodels", {"model": name, "format": kind}, asked)
                for n, host in enumerate(hosts):
                    probes, intervals = np.array(found["probes"][n]), np.array(found["intervals"][n])
                    known = DeviceSamples(
                        model, device_of(fleet[:-2], host, kind), probes[:, :2].astype(int), probes[:, 2:],
                        intervals[:, :2].astype(int), intervals[:, 2:], np.array(found["layers"][n]),
                    )  # fmt: skip
                    data.append(Gathered(name, known, np.array(found["passes"][n])))
    return data


def _take_kept(experiment: Experiment) -> None:
    """Start with the results in data.h5, unless there are results already or ``--fresh`` is given."""
    kept = JOB.with_name("data.h5")
    if kept.exists() and not experiment.store.path.exists() and "--fresh" not in sys.argv:
        experiment.store.take(kept)


def _outline(settings: list[str], kind: str) -> Outline:
    """The model's outline in a form whose key is the same for all memory formats, since these belong to the device."""
    job = parse(JOB.read_text(), str(JOB), [*settings, f"train.memory_format={kind}"])
    chain = load_model(job.model.name, job.model.args, job.train.seed)
    inputs = micro_batch(load_data(job.data.name, job.data.args)[0], job).inputs
    found = outline_of(chain, job, inputs)
    layers = tuple(
        msgspec.structs.replace(layer, inputs=tuple(_laid_out(spec) for spec in layer.inputs)) for layer in found.layers
    )
    return msgspec.structs.replace(found, layers=layers, channels_last=False)


def _laid_out(spec: TensorSpec) -> TensorSpec:
    """The spec with contiguous strides."""
    return msgspec.structs.replace(spec, stride=torch.empty(spec.shape, device="meta").stride())
