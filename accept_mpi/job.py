"""The job file: TOML -> typed, validated ``Job``. Every mistake is one sentence that names the file and the key."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
PositiveOrZero = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]
MOST_THREADS = 1024
_MOST_SAMPLES = 1 << 24  # a step
MOST_ENTRIES = 4096  # of a list: no pipeline has so many stages
_LARGEST = 1e30  # of what is computed with in single precision

MOST_EXTRA = 3
"""Own copies between two snapshots, where a loss is to cost so many steps at most."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the job file."""


class Model(Section, frozen=True):
    """``[model]``."""

    name: str
    """Zoo name, or "package.module:function" that returns an nn.Sequential or a list of layers."""
    args: dict[str, Any] = {}


class Data(Section, frozen=True):
    """``[data]``."""

    name: str
    """Zoo name, or "package.module:function" that returns (train, test) data sets."""
    args: dict[str, Any] = {}


class Optimizer(Section, frozen=True):
    """``train.optimizer``: torch's own, and how its learning rate changes from step to step."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Positive = 0.05
    momentum: Share = 0.0
    nesterov: bool = False
    weight_decay: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Annotated[float, Meta(gt=0, le=_LARGEST)] = 1e-8
    schedule: Literal["constant", "cosine", "step"] = "constant"
    warmup_steps: CountOrZero = 0
    """Steps over which the rate rises linearly to ``lr``, before the schedule begins."""
    decay_every: Count = 1000
    """Steps between two decays of the "step" schedule."""
    decay: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """Factor of one decay of the "step" schedule."""
    final_lr: Annotated[float, Meta(ge=0, le=_LARGEST)] = 0.0
    """Where the "cosine" schedule ends."""


class Train(Section, frozen=True):
    """``[train]``."""

    batch_size: Annotated[int, Meta(ge=1, le=_MOST_SAMPLES)] = 64
    """Samples a step (one optimizer update)."""
    micro_batches: Annotated[int, Meta(ge=1, le=65536)] = 8
    epochs: Annotated[int, Meta(ge=1, le=10**8)] | None = None
    steps: Count | None = None
    """Length of the run: either ``epochs`` or ``steps``."""
    optimizer: Optimizer = Optimizer()
    lr: Positive | None = None
    """Short for ``optimizer.lr``; one of the two is given."""
    loss: str = "cross_entropy"
    """"cross_entropy", "mse", or "package.module:function" of (output, target) that gives the mean over samples, or
    (sum, count)."""
    seed: CountOrZero = 0
    drop_last: bool = False
    """Leave out the short batch at the end of an epoch."""
    evaluate_every: CountOrZero = 1
    """Epochs between two evaluations on the test set; one more at the end; 0: none at all."""
    memory_format: Literal["auto", "channels_last", "contiguous"] = "auto"
    """Layout of image tensors; "auto": channels_last for models with 2-D convolutions."""
    threads: Annotated[int, Meta(ge=1, le=MOST_THREADS)] | Literal["auto"] = "auto"
    """Threads a rank computes with; "auto": OMP_NUM_THREADS, else the host's cores shared among its ranks."""


class Pipeline(Section, frozen=True):
    """``[pipeline]``."""

    schedule: Literal["gpipe", "1f1b", "1f1b-async", "zero-bubble"] = "1f1b"
    cuts: Literal["auto", "even"] | Annotated[list[Count], Meta(max_length=MOST_ENTRIES)] = "auto"
    """ "auto": measure the devices and their links, and cut where training is fastest; "even" (by number of layers); or
    the first layers of stages 1, 2, ..."""
    ranks: Annotated[list[CountOrZero], Meta(max_length=MOST_ENTRIES)] = []
    """Ranks that hold stages 0, 1, ...; the others stay idle. Empty: all ranks, in order. "auto" cuts choose their own."""
    adapt: bool | Count = False
    """While training, cut anew where devices turn out so much faster or slower that it pays. A number: look every so many
    steps (FTPipeHD). Given cuts then are a guess, by rank 0's measurements of itself as if all were alike."""
    probe_seconds: Positive = 5.0
    """Seconds that each device times layers before "auto" cuts; a tenth of it, where the latency database knows it."""
    latency_db: str = "auto"
    """Latency database of "auto" cuts, on rank 0: a path, "auto" (latency.h5 in the user's cache) or "none"."""
    transfer_slack: CountOrZero = 2
    """Micro-batches that a stage may have in flight beyond the published 1F1B bound, for each boundary behind it, so that
    transfers hide behind computing: 0 is the published bound, 1 Asteroid's K_p = 2(P-p)-1, and 2 hides a transfer each way
    that takes as long as a stage computes."""
    forward: str | Annotated[list[str], Meta(max_length=MOST_ENTRIES)] = "none"
    """Codec of activations, for all boundaries or one each: "none", "bf16", "fp16", "uniform:4", "mbq:2", ...
    (``coding``), or "auto": the mildest that hides the transfer behind computing (``bits``)."""
    backward: str | Annotated[list[str], Meta(max_length=MOST_ENTRIES)] = "none"
    """Codec of gradients."""
    min_bits: Annotated[int, Meta(ge=1, le=8)] = 2
    """"auto" codecs have at least this many bits a value."""
    vertical_sync: bool = False
    """1f1b-async: a micro-batch meets the same weight version at all stages (PipeDream, section 3.3)."""
    timeout: Positive = 300.0
    """Seconds that a rank waits for a message before it ends the run."""
    startup_timeout: Positive = 600.0
    """The same for start-up and the first step."""


class Recovery(Section, frozen=True):
    """``[recovery]``: of a run under an MPI that survives the loss of a process (``mpirun --with-ft ulfm``)."""

    replicate_every: CountOrZero | Literal["auto"] = "auto"
    """Steps between two snapshots that each stage sends to the next one's rank: a loss costs no more steps than that.
    "auto": from what a snapshot takes and ``mean_time_between_failures`` (Young 1974); 0: none, a loss goes back to the
    last checkpoint."""
    mean_time_between_failures: Annotated[float, Meta(gt=0, le=1e12)] = 3600.0
    """Seconds until one of the devices fails, on average."""


class Output(Section, frozen=True):
    """``[output]``."""

    directory: str
    checkpoint_every: CountOrZero = 0
    """Steps between two checkpoints; 0: one at the end only."""
    checkpoint_at_end: bool = True
    """False: no checkpoint after the last step (it crosses the network, too)."""
    keep: CountOrZero = 3
    """Newest checkpoints kept; 0: all."""


GOES_WITH = {
    "momentum": ("name", ("sgd",)),
    "nesterov": ("name", ("sgd",)),
    "betas": ("name", ("adam", "adamw")),
    "eps": ("name", ("adam", "adamw")),
    "decay_every": ("schedule", ("step",)),
    "decay": ("schedule", ("step",)),
    "final_lr": ("schedule", ("cosine",)),
}
"""Keys of ``train.optimizer`` that only some of its choices heed."""


class Job(Section, frozen=True):
    """A whole job file."""

    model: Model
    data: Data
    output: Output
    train: Train = Train()
    pipeline: Pipeline = Pipeline()
    recovery: Recovery = Recovery()

    @property
    def lr(self) -> float:
        """At most what torch can multiply by in single precision; weights are not finite long before."""
        return min(self.train.lr if self.train.lr is not None else self.train.optimizer.lr, _LARGEST)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> "Job":
        return msgspec.json.decode(text, type=Job)


def most_held(replicate_every: int | str) -> int:
    """States of a stage's size that a rank holds at most: its own and its neighbour's, of the last snapshot, the next one
    and extra ones in between. ``replicate_every``: as in the job, not 0."""
    return 2 * (2 + (MOST_EXTRA if isinstance(replicate_every, int) else 0))
