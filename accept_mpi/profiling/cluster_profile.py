"""The cluster profile, from which plans are made: measurements of all devices and of their links. Kept in a run's log.

Layout in HDF5 (group ``survey`` of a log, version 1): datasets ``outline`` and ``devices`` (JSON as bytes), ``times``
(4 x devices x layers: seconds of forward, backward, the backward's weight gradients, update), ``rate`` (bytes/s from row to
column) and ``latency`` (seconds).
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta

from accept_mpi.errors import UserError
from accept_mpi.files.hdf5 import Damaged, number_in, values_in
from accept_mpi.plan import Lanes, StagePlan, slots_in
from accept_mpi.profiling.outline import Outline

_MOST_DEVICES, _MOST_LAYERS = 4096, 1 << 16
_LARGEST = 1e18  # bytes, operations
_TIMES = ("forward", "backward", "weight_gradient", "update")


# Field names in files, so that logs of earlier versions can be read.
_NAMES = {"seconds_per_byte": "byte", "seconds_per_message": "message", "weight_gradient": "weights"}


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, rename=_NAMES):
    """Measurements of one rank. Lists have seconds per micro-batch for each layer (``update``: per step)."""

    host: str
    forward: list[float] = []
    backward: list[float] = []
    """Seconds of the gradients of inputs and weights."""
    weight_gradient: list[float] = []
    """Part of ``backward`` that the zero-bubble schedule can put off."""
    update: list[float] = []
    encode: dict[str, float]
    """Seconds per value, by codec."""
    decode: dict[str, float]
    seconds_per_byte: float
    """Seconds to send or receive a byte."""
    seconds_per_message: float = 0.0
    """Seconds to send or receive a message, without its bytes and coding."""
    shared: bool
    """True if the data-plane thread competes with computation for the same core."""
    memory: float
    """Bytes that a stage may take."""
    snapshots: bool = False
    """True if the rank keeps copies of its own stage's state and of another stage's."""
    lanes: dict[int, float] = {}
    """Seconds per micro-batch with so many lanes, all of them together, as a multiple of those with one."""
    factor: float = 1.0
    """Factor by which its times were scaled after the measurement (``planning.adaptation``)."""
    assumed: bool = False
    """True if its times are rank 0's, because it has measured nothing itself."""
    data: bool = True
    """True if it has the data set, so that it can hold the first or the last stage."""
    alone: bool = False
    """True if it cannot hold a stage together with others (``device.compute``)."""

    def in_lane(self, lanes: Lanes) -> float:
        """Seconds of a micro-batch in one of so many lanes, all of them busy, as a multiple of those with one."""
        return slots_in(lanes) * self._gain(lanes)

    def passes(self, stage: StagePlan, rank: int) -> tuple[float, float]:
        """Seconds of a micro-batch's forward and backward through a stage, on this device as one of its ranks, with all its
        lanes busy."""
        mine, longer = slice(stage.start, stage.stop), self.in_lane(stage.lanes_of(rank))
        forward, backward = sum(self.forward[mine]), sum(self.backward[mine])
        return longer * forward, longer * (backward + (forward if stage.recompute else 0.0))

    def with_lanes(self, lanes: Lanes) -> "DeviceProfile":
        """A copy whose times are those of all its lanes together: as if it were that much faster."""
        factor = self._gain(lanes)
        layers = {name: [factor * seconds for seconds in getattr(self, name)] for name in _TIMES if name != "update"}
        return msgspec.structs.replace(self, **layers)

    def _gain(self, lanes: Lanes) -> float:
        return 1.0 if lanes == "F+B" else self.lanes.get(lanes, 1.0)

    def slowed(self, factor: float) -> "DeviceProfile":
        """A copy in which everything (computing, coding, sending) takes ``factor`` times as long."""
        layers = {name: [factor * seconds for seconds in getattr(self, name)] for name in _TIMES}
        coding = {name: {k: factor * v for k, v in getattr(self, name).items()} for name in ("encode", "decode")}
        once = {name: factor * getattr(self, name) for name in ("seconds_per_byte", "seconds_per_message", "factor")}
        return msgspec.structs.replace(self, **once, **layers, **coding)


class ClusterProfile(msgspec.Struct, frozen=True):
    """A model's outline with the measurements of the devices that are to train it and of their links."""

    outline: Outline
    devices: list[DeviceProfile]
    rate: list[list[float]]
    """Bytes/s from device (row) to device (column), with both directions busy."""
    latency: list[list[float]]
    """Seconds from device (row) to device (column)."""

    def host_link(self, device: int) -> float:
        """Bytes/s of a device's own link, which all its neighbours share: its best rate to another host."""
        hosts = [other.host for other in self.devices]
        others = [rate for other, rate in enumerate(self.rate[device]) if other != device]
        away = [rate for other, rate in enumerate(self.rate[device]) if hosts[other] != hosts[device]]
        return max(away or others or [1e12])

    @property
    def snapshots(self) -> bool:
        """True if devices keep copies of their own stages' state and of others'."""
        return any(device.snapshots for device in self.devices)

    def within(self, rooms: Sequence[float]) -> "ClusterProfile":
        """A copy in which device ``n`` has at most ``rooms[n]`` bytes of memory."""
        devices = [
            msgspec.structs.replace(device, memory=min(device.memory, room))
            for device, room in zip(self.devices, rooms, strict=True)
        ]
        return msgspec.structs.replace(self, devices=devices)

    def only(self, devices: list[int]) -> "ClusterProfile":
        """A cluster profile of these devices only, in this order."""
        rate, latency = ([[table[a][b] for b in devices] for a in devices] for table in (self.rate, self.latency))
        return ClusterProfile(self.outline, [self.devices[n] for n in devices], rate, latency)

    def write(self, group: Any) -> None:
        """Write the profile into an empty HDF5 group."""
        bare = [msgspec.structs.replace(device, **{name: [] for name in _TIMES}) for device in self.devices]
        group.attrs["version"] = 1
        # Datasets, since attributes hold 64 KiB at most.
        group["outline"] = np.frombuffer(msgspec.json.encode(self.outline), np.uint8)
        group["devices"] = np.frombuffer(msgspec.json.encode(bare), np.uint8)
        group["times"] = np.array([[getattr(device, name) for device in self.devices] for name in _TIMES])
        group["rate"], group["latency"] = np.array(self.rate), np.array(self.latency)

    @staticmethod
    def read(group: Any) -> "ClusterProfile":
        """Read a profile from an HDF5 group. Raises UserError if the group does not hold a valid one."""
        where = group.file.filename
        try:
            if (version := number_in(group, "version")) != 1:
                raise UserError(f"{where}: cluster profile, layout version {version} is not known here")
            outline = outline_in(group)
            said = values_in(group, "devices", dtype=np.uint8, shape=(None,)).tobytes()
            devices = msgspec.json.decode(
                said, type=Annotated[list[DeviceProfile], Meta(min_length=1, max_length=_MOST_DEVICES)]
            )
            times = values_in(group, "times", kinds="f", shape=(len(_TIMES), len(devices), len(outline.layers)))
            devices = [
                msgspec.structs.replace(device, **{name: times[k, n].tolist() for k, name in enumerate(_TIMES)})
                for n, device in enumerate(devices)
            ]
            pairs = (len(devices), len(devices))
            rate, latency = (values_in(group, name, kinds="f", shape=pairs) for name in ("rate", "latency"))
            _check_numbers(msgspec.to_builtins([*devices, latency.tolist()]), "devices")
            if not (rate > 0).all():  # a device's rate to itself is infinite
                raise Damaged("a rate in it is none")
        except (Damaged, RecursionError, msgspec.MsgspecError) as error:
            raise UserError(f"{where}: the cluster profile in it cannot be read: {error}") from error
        return ClusterProfile(outline, devices, rate.tolist(), latency.tolist())


def outline_in(group: Any, name: str = "outline") -> Outline:
    """Read a model's outline, stored as JSON bytes in a group. Raises Damaged if it is not a valid outline."""
    try:
        outline = msgspec.json.decode(values_in(group, name, dtype=np.uint8, shape=(None,)).tobytes(), type=Outline)
    except (RecursionError, msgspec.MsgspecError) as error:
        raise Damaged(f"an outline that is none: {error}") from error
    if not 1 <= len(outline.names) == len(outline.layers) <= _MOST_LAYERS:
        raise Damaged(f"an outline of {len(outline.layers)} layers and {len(outline.names)} names")
    _check_numbers(msgspec.to_builtins(outline), "an outline")
    return outline


def _check_numbers(value: Any, what: str) -> None:
    """Raises Damaged if any number in nested plain data is negative, NaN or too large, or a dtype is not one of torch's."""
    if isinstance(value, dict):
        if not isinstance(getattr(torch, value.get("dtype", "float32"), None), torch.dtype) and value["dtype"] != "absent":
            raise Damaged(f'{what} with a dtype "{value["dtype"]}"')
        for each in value.values():
            _check_numbers(each, what)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_numbers(each, what)
    elif isinstance(value, int | float) and not 0 <= value <= _LARGEST:
        raise Damaged(f"{what} with the number {value}")


class StageTimes(msgspec.Struct, frozen=True):
    """Seconds that one rank takes for its stage and for messages."""

    forward: float
    """Seconds per micro-batch."""
    backward: float
    """Seconds per micro-batch, weight gradients included."""
    encode: dict[str, float]
    """Seconds per value, by codec."""
    decode: dict[str, float]
    seconds_per_byte: float = 0.0
    """Seconds to send or receive a byte."""
    seconds_per_message: float = 0.0
    """Seconds to send or receive a message, without its bytes and coding."""
    shared: bool = False
    """True if the data-plane thread competes with computation for the same core."""
    weight_gradient: float | None = None
    """Part of ``backward`` that is the zero-bubble schedule's W; None stands for half of it."""
    update: float = 0.0
    """Seconds per optimizer step."""
