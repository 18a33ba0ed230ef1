"""The settings of a run, typed and validated. ``job_file`` reads them from TOML."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]
MOST_THREADS = 1024
_MOST_SAMPLES = 1 << 24  # per step
MOST_ENTRIES = 4096  # in a list: no pipeline has more stages
_LARGEST = 1e30  # limit of numbers that enter single-precision arithmetic

LONGEST_METRIC = 80
"""Bytes of a metric's name in the log."""
MOST_LANES = 64
MOST_SLACK = 2
"""The ``transfer_slack`` that hides transfers best; more gains nothing."""
MOST_EXTRA = 3
"""Most extra snapshots between two regular ones, where ``replicate_every`` is a number and the links are too slow for it."""
LOCAL_KEPT = 3
"""Local copies of its state (``recovery.barriers``) that a rank keeps, the newest ones, where groups hold stages."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the job file's tables: immutable, and unknown keys are refused."""


class Model(Section, frozen=True):
    """``[model]``: the network to train."""

    name: str
    """Name in the zoo, "transformers:Class" (``args`` are the keys of its configuration), "timm:name", or
    "package.module:function" that returns an nn.Module or a list of layers."""
    args: dict[str, Any] = {}
    output: str = ""
    """Of a model with a forward of its own: the part of its result that the loss gets, by key, attribute or position;
    "loss": the model computes its loss itself. Empty: the tensor that it gives, or its "logits"."""
    blocks: str | tuple[str, ...] = ()
    """Of a model with a forward of its own: names of modules, or patterns of names, that stay whole: what they compute may
    depend on values. Of a list or sequence of modules ("transformer.h") each part is a block."""
    weights: str = ""
    """File to begin with: .safetensors, one of torch.save, or the index of several; empty: initial weights."""
    strict: bool = True
    """False: load of ``weights`` what fits, and leave the rest as it is."""


class Data(Section, frozen=True):
    """``[data]``: the training and the test set."""

    name: str
    """Name in the zoo, or "package.module:function" that returns (train, test) data sets."""
    args: dict[str, Any] = {}


class Optimizer(Section, frozen=True):
    """``train.optimizer``: one of torch's optimizers, and how its learning rate changes from step to step."""

    name: Literal["sgd", "adam", "adamw", "nadam", "lion", "muon"] = "sgd"
    """nadam, lion and muon: with decoupled weight decay, as adamw."""
    lr: Positive = 0.05
    momentum: Share = 0.0
    nesterov: bool = False
    muon_momentum: Share = 0.95
    weight_decay: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Annotated[float, Meta(gt=0, le=_LARGEST)] = 1e-8
    schedule: Literal["constant", "cosine", "step"] = "constant"
    warmup_steps: CountOrZero = 0
    """Steps over which the learning rate rises linearly to ``lr``, before the schedule begins."""
    decay_every: Count = 1000
    """Steps between two decays of the "step" schedule."""
    decay: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """Factor of each decay of the "step" schedule."""
    final_lr: Annotated[float, Meta(ge=0, le=_LARGEST)] = 0.0
    """Learning rate at the end of the "cosine" schedule."""
    correction: Literal["none", "extrapolate"] = "none"
    """extrapolate: updates from older weights' gradients are corrected by how they have changed (``pipeline.correction``);
    for the schedules 1f1b-delayed and 1f1b-async."""
    decay_vectors: bool = True
    """False: no weight decay for parameters of fewer than two dimensions, which are norms and biases."""


Pattern = Annotated[str, Meta(min_length=1, description="a text, not empty")]
Patterns = Annotated[list[Pattern], Meta(max_length=MOST_ENTRIES)]
"""Patterns of names, as in a shell: "backbone.*"."""
Named = Annotated[list[Pattern], Meta(min_length=1, max_length=MOST_ENTRIES)]
"""The same, where there must be one."""


class ParameterGroup(Section, frozen=True):
    """An entry of ``train.groups``: parameters with settings of their own. A parameter is of the first group that fits."""

    names: Named
    lr: Annotated[float, Meta(ge=0, le=_LARGEST)] | None = None
    """Learning rate in place of the optimizer's; its schedule is the same."""
    weight_decay: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    adamw: bool = False
    """True: AdamW updates them, where Muon would."""


DEVICES = r"^(cpu|auto|cuda(:\d{1,3})?)$"
Device = Annotated[str, Meta(pattern=DEVICES, description='one of "cpu", "auto", "cuda", "cuda:1"')]


class Lora(Section, frozen=True):
    """``train.lora``: low-rank adapters, the only parts that are trained then (and ``train.unfreeze``)."""

    targets: Named
    """Names of linear modules."""
    rank: Annotated[int, Meta(ge=1, le=4096)] = 8
    alpha: Positive | None = None
    """What adapters add is multiplied by alpha / rank; as large as ``rank`` if not given."""


class Mix(Section, frozen=True):
    """``train.mix``: samples of a micro-batch are mixed, by mixup or CutMix, each for half of them if both are on."""

    classes: Count
    """Number of classes; targets become probabilities."""
    mixup: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Parameter of mixup's Beta distribution; 0: none."""
    cutmix: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """The same of CutMix's."""


class Train(Section, frozen=True):
    """``[train]``: batches, length of the run, optimizer and loss."""

    batch_size: Annotated[int, Meta(ge=1, le=_MOST_SAMPLES)] = 64
    """Samples per step (one optimizer update)."""
    micro_batches: Annotated[int, Meta(ge=1, le=65536)] | Literal["auto"] = 8
    """Parts of a step's samples; "auto": as many as make training fastest (``planning.micro_batches``)."""
    epochs: Annotated[int, Meta(ge=1, le=10**8)] | None = None
    steps: Count | None = None
    """Length of the run: exactly one of ``epochs`` and ``steps`` is given."""
    optimizer: Optimizer = Optimizer()
    lr: Positive | None = None
    """Short for ``optimizer.lr``; at most one of the two is given."""
    loss: str = "cross_entropy"
    """Name ("cross_entropy", "mse") or "package.module:function" of (output, target) that returns the mean over samples, or
    (sum, count)."""
    seed: CountOrZero = 0
    drop_last: bool = False
    """True: leave out the short batch at the end of an epoch."""
    evaluate_every: CountOrZero = 1
    """Epochs between two evaluations on the test set, with one more at the end of the run; 0: no evaluation."""
    metrics: Patterns = []
    """What an evaluation reports beside loss and accuracy: "top5", "perplexity", "mae", "mse", or "package.module:function"
    of (output, target) that returns a mean over samples, or (sum, count)."""
    patience: Count | None = None
    """Evaluations without a better ``output.keep_best`` after which the run ends; None: it does not end before its time."""
    memory_format: Literal["auto", "channels_last", "contiguous"] = "auto"
    """Layout of image tensors; "auto": channels_last for models with 2-D convolutions."""
    device: Device | dict[str, Device] = "cpu"
    """Where stages are computed: "cpu", "cuda", "cuda:1", or "auto", a GPU if torch sees one; or a table of these by
    patterns of hosts' names, and the CPU on others (``device.compute``)."""
    threads: Annotated[int, Meta(ge=1, le=MOST_THREADS)] | Literal["auto"] = "auto"
    """Computing threads per rank; "auto": OMP_NUM_THREADS, else the host's cores divided among its ranks."""
    freeze: Patterns = []
    """Parameters that are not trained. BatchNorm whose parameters are all frozen keeps its statistics."""
    unfreeze: Patterns = []
    """Parameters that are trained although ``freeze`` or ``lora`` freezes them."""
    lora: Lora | None = None
    groups: Annotated[list[ParameterGroup], Meta(max_length=MOST_ENTRIES)] = []
    clip_norm: Positive | None = None
    """Most that the norm of all gradients together may be; larger ones are scaled down."""
    mix: Mix | None = None
    label_smoothing: Share = 0.0
    """Of the loss "cross_entropy"."""
    class_weights: Annotated[list[Annotated[float, Meta(ge=0, le=_LARGEST)]], Meta(max_length=MOST_ENTRIES)] = []
    """Of the loss "cross_entropy": a weight for each class."""
    ema: Share = 0.0
    """Decay of a moving average of the weights, with which the model is evaluated; 0: none."""
    precision: Literal["float32", "bf16"] = "float32"
    """"bf16": torch's autocast, in forwards and their backwards."""


ScheduleKind = Literal["gpipe", "1f1b", "1f1b-async", "1f1b-delayed", "zero-bubble"]


def flows(schedule: ScheduleKind) -> bool:
    """True if the pipeline goes from step to step without draining, so that micro-batches in flight use older weights."""
    return schedule in ("1f1b-async", "1f1b-delayed")


class Pipeline(Section, frozen=True):
    """``[pipeline]``: schedule, cuts, codecs and timeouts."""

    schedule: ScheduleKind = "1f1b"
    cuts: Literal["auto", "even"] | Annotated[list[Count], Meta(max_length=MOST_ENTRIES)] = "auto"
    """First layers of stages 1, 2, ...; "even": by number of layers; "auto": where training is fastest, by measuring the
    devices and their links."""
    ranks: Annotated[
        list[CountOrZero | Annotated[list[CountOrZero], Meta(min_length=1, max_length=MOST_ENTRIES)]],
        Meta(max_length=MOST_ENTRIES),
    ] = []
    """Ranks that hold stages 0, 1, ...; a list of ranks in it holds one stage together, each taking some of the
    micro-batches. The others stay idle. Empty: all ranks, in order. Only with given or "even" cuts."""
    speeds: Annotated[list[Positive | list[Positive]], Meta(max_length=MOST_ENTRIES)] = []
    """Relative speeds of the ranks in ``ranks``, in the same form: a rank twice as fast as another of its group takes twice
    as many micro-batches. Empty: the ranks of a group are alike."""
    adapt: bool | Count = False
    """True: change the cuts during training when a device becomes enough faster or slower for that to pay. A number N: check
    every N steps (FTPipeHD). Given cuts are then a first guess; it is judged as if all devices were like rank 0, the only
    one that is measured."""
    probe_seconds: Positive = 5.0
    """Seconds for which each device times layers before "auto" cuts; a fifth of it at most if the latency database knows the
    device."""
    latency_db: str = "auto"
    """Latency database for "auto" cuts, on rank 0: a path, "auto" (latency.h5 in the user's cache) or "none"."""
    transfer_slack: CountOrZero | Literal["auto"] = "auto"
    """Micro-batches that a stage may have in flight beyond the published 1F1B bound, per boundary between it and the last
    stage, so that transfers hide behind computation. 0 is the published bound, 1 is Asteroid's K_p = 2(P-p)-1, and 2 hides a
    transfer each way that takes as long as a stage computes. "auto": 2, or with "auto" cuts fewer where memory is short for
    the fastest plan, or where ``1f1b-async`` trains as fast on newer weights (``planning.planner``)."""
    forward: str | Annotated[list[str], Meta(max_length=MOST_ENTRIES)] = "none"
    """Codec of activations, one for all boundaries or one per boundary: "none", "bf16", "fp16", "uniform:4", "mbq:2", ...
    (``codecs.coding``), or "auto": the mildest that hides the transfer behind computation (``planning.codec_choice``)."""
    backward: str | Annotated[list[str], Meta(max_length=MOST_ENTRIES)] = "none"
    """Codec of gradients, given like ``forward``."""
    lanes: Literal["auto", "off", "F+B"] | Annotated[int, Meta(ge=1, le=MOST_LANES)] = "auto"
    """How many micro-batches each rank computes at a time, with a share of its threads each; "F+B": one forward beside one
    backward (ICPADS 2022); "auto": as many as train fastest, where "auto" cuts have the devices measured, else "off"."""
    recompute: Literal["auto", "on", "off"] = "auto"
    """Whether stages compute forwards again in their backwards instead of keeping activations; "auto": those stages for
    which memory is too short otherwise, where "auto" cuts have the devices measured."""
    groups: bool = True
    """Whether "auto" cuts may have several ranks hold a stage together."""
    gradients: str = "exact"
    """Where several ranks hold a stage: how their gradients are summed. "exact": micro-batch by micro-batch in order, as one
    process does, bit for bit; "none": each rank's own sum, uncoded, which differs by rounding and sends less; "bf16",
    "uniform:8", ...: that sum coded, what coding leaves out being added to the next one; "auto": the mildest of these with
    which a step hardly takes longer than with the fastest (``planning.groups``)."""
    min_bits: Annotated[int, Meta(ge=1, le=8)] = 2
    """Fewest bits per value that "auto" codecs may use."""
    entropy: bool = False
    """Whether "auto" codecs may be entropy codes, activations' in a basis: fewer errors in as many bytes, for much more CPU
    time."""
    vertical_sync: bool = False
    """1f1b-async: a micro-batch uses the same weight version at all stages (PipeDream, section 3.3)."""
    timeout: Positive = 300.0
    """Seconds that a rank waits for a message before it ends the run."""
    startup_timeout: Positive = 600.0
    """Seconds that a rank waits for a message during start-up and the first step."""

    @property
    def slack(self) -> int:
        """``transfer_slack``, or the most that "auto" may choose."""
        return MOST_SLACK if self.transfer_slack == "auto" else self.transfer_slack


class Recovery(Section, frozen=True):
    """``[recovery]``: for runs under an MPI that survives the loss of a process (``mpirun --with-ft ulfm``)."""

    replicate_every: CountOrZero | Literal["auto"] = "auto"
    """Steps between two snapshots, in which each stage sends its state to the next stage's rank; a loss costs at most that
    many steps. "auto": Young's rule (1974), from the duration of a snapshot and ``mean_time_between_failures``. 0: no
    snapshots, a loss returns to the last checkpoint."""
    mean_time_between_failures: Annotated[float, Meta(gt=0, le=1e12)] = 3600.0
    """Average seconds until one of the devices fails."""

    def copies(self, ranks: int, survives: bool) -> bool:
        """Whether stages' state is copied to other ranks: there are some, and the run ``survives`` the loss of one."""
        return survives and ranks > 1 and self.replicate_every != 0


class Output(Section, frozen=True):
    """``[output]``: the run's directory and its checkpoints."""

    directory: str
    checkpoint_every: CountOrZero = 0
    """Steps between two checkpoints; 0: only one at the end."""
    checkpoint_at_end: bool = True
    """False: no checkpoint after the last step, whose state would cross the network once more."""
    keep: CountOrZero = 3
    """Number of newest checkpoints that are kept; 0: all."""
    keep_best: str = ""
    """"loss", "accuracy" or a metric: every evaluation makes a checkpoint, and the best one is kept besides."""


GOES_WITH = {
    "momentum": ("name", ("sgd",)),
    "nesterov": ("name", ("sgd",)),
    "muon_momentum": ("name", ("muon",)),
    "betas": ("name", ("adam", "adamw", "nadam", "lion", "muon")),
    "eps": ("name", ("adam", "adamw", "nadam", "muon")),
    "decay_every": ("schedule", ("step",)),
    "decay": ("schedule", ("step",)),
    "final_lr": ("schedule", ("cosine",)),
}
"""Keys of ``train.optimizer`` that only some optimizers or schedules use: key -> (deciding key, its choices)."""


class Job(Section, frozen=True):
    """A complete job file."""

    model: Model
    data: Data
    output: Output
    train: Train = Train()
    pipeline: Pipeline = Pipeline()
    recovery: Recovery = Recovery()

    @property
    def parts_ties(self) -> bool:
        """Whether stages may each have a copy of a parameter that layers have in common. In 1f1b-async they do not update at
        the same time, so their copies would differ."""
        return self.pipeline.schedule != "1f1b-async"

    @property
    def lr(self) -> float:
        """Learning rate, capped at what torch can multiply by in single precision; weights overflow far below that."""
        return min(self.train.lr if self.train.lr is not None else self.train.optimizer.lr, _LARGEST)

    def without_weights(self) -> "Job":
        """The same job, whose model does not begin with a file's weights: a checkpoint has others."""
        return msgspec.structs.replace(self, model=msgspec.structs.replace(self.model, weights=""))

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> "Job":
        return msgspec.json.decode(text, type=Job)


def most_held(replicate_every: int | str) -> int:
    """Most copies of a stage's state that a rank holds at once: its own and its neighbour's, of the last snapshot, the next
    one and the extra ones in between. ``replicate_every``: the job's, not 0."""
    return 2 * (2 + (MOST_EXTRA if isinstance(replicate_every, int) else 0))
