"""Profile: what was measured on one device for one model, and the fingerprint that says where it holds. Plain data.

Every module's time is seconds per layer, a mean over the layers. Where the two tiers share a CPU's cores there are two
sets: "alone" (the host tier is idle, the device tier has all its cores) and "shared".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omniserve.latency.features import AlphaBeta, BatchFeatures, ModelShape

logger = logging.getLogger(__name__)

FORMAT = 1
STATES = ("alone", "shared")
"""The share of cores: the device tier has all of them, or shares them with a host tier that works."""

Points = tuple[tuple[int, float], ...]
"""(rows, seconds)."""
Table = tuple[tuple[float, ...], ...]
"""Rows of quantities, the last of which is seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSample:
    """A measured step of an engine, from asking the scheduler to handing out tokens."""

    features: BatchFeatures
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """The conditions that a measured time depends on. Two profiles are comparable only if all of these are equal."""

    model: str
    """Hash of the model's configuration."""
    dtype: str
    device: str
    """Name of the GPU or CPU."""
    device_threads: int
    """CPU threads of the device tier while the host tier is idle."""
    shared_threads: int
    """CPU threads of the device tier while the host tier works."""
    host_threads: int
    """CPU threads of the host tier; 0: there is none."""
    host_kv_dtype: str
    block_size: int
    attention: str
    """Name in DEVICE_ATTENTION, as configured."""
    compile: bool
    torch: str
    extension: str
    """Version of OmniServe and hash of its compiled extension."""
    kernels: str
    """The instruction set asked for by OMNISERVE_ISA; empty: the best."""
    kv_dtype: str = "auto"
    """Dtype of the device's KV."""
    weights: str = ""
    """Dtype in which linears hold their weights where that is not ``dtype``, and classes of adapters and of quantised
    weights."""
    constant_steps: bool = False
    """Modules were measured as they run in steps of constant shapes, on a GPU as CUDA graphs."""
    ranks: str = ""
    """The number of ranks that serve the model, and their network, as text; empty: one rank."""

    def differences(self, other: Fingerprint) -> list[str]:
        """Return ``field: mine, not other's`` for each field that differs."""
        return [
            f"{f.name}: {getattr(self, f.name)!r}, not {getattr(other, f.name)!r}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]

    @property
    def host_has_own_cores(self) -> bool:
        """The device tier loses no CPU threads to a host tier that works."""
        return self.device_threads == self.shared_threads

    @property
    def key(self) -> str:
        """A short hash of all fields."""
        fields = dataclasses.asdict(self)
        for name, usual in (("constant_steps", False), ("kv_dtype", "auto"), ("weights", ""), ("ranks", "")):
            if fields[name] == usual:
                del fields[name]  # profiles of earlier versions, which had no such field, are still found
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


_MOST_SPREAD, _MOST_WAITED, _MOST_OTHERS_CORES = 0.5, 0.1, 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """The state of the machine while it was measured."""

    spread: float
    """The spread of repeated measurements: the median over the least, less 1; the median of all points."""
    waited: float
    """Share of the time that the measuring thread could have run and had no core."""
    others_cores: float
    """Cores of this process that others kept busy, other guests of the same hardware included."""
    spare_cores: int
    """Number of cores that measuring left to others."""

    def disturbances(self) -> list[str]:
        """Return what shows that others disturbed the measurement, in words; nothing if nothing does."""
        found = []
        if self.spread > _MOST_SPREAD:
            found.append(f"repeated measurements took {self.spread:.0%} longer than the shortest")
        if self.waited > _MOST_WAITED:
            found.append(f"measuring waited for a core {self.waited:.0%} of the time")
        if self.others_cores > self.spare_cores + _MOST_OTHERS_CORES:
            found.append(f"others kept {self.others_cores:.1f} cores busy, {self.spare_cores} were left for them")
        return found


class ProfileMismatch(ValueError):
    """A profile was made for something else; the message says what differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The measurements."""

    fingerprint: Fingerprint
    shape: ModelShape
    seconds: float
    """Seconds that measuring took, without what does not count against the time limit (see ``profile_model``)."""
    dense: Mapping[str, Points]
    """State -> (rows, seconds) of pre- and post-attention of a layer (Algorithm 1's points)."""
    head: Mapping[str, Points]
    """State -> (rows, seconds) of final norm, logits and greedy sampling."""
    prefill_attention: Mapping[str, Table]
    """State -> (chunk, context before it, seconds) of storing K and V and attending, one request."""
    decode_attention: Mapping[str, Table]
    """State -> (requests, context of all together, seconds)."""
    piggyback: Table = ()
    """(seats, rows, seconds) of what a layer does more for piggyback tokens: w, less the seats' share of the halves."""
    host_attention: Table = ()
    """(requests, context of all together, threads, seconds) of one layer's attention tasks on the host tier."""
    host_drafts: Table = ()
    """(requests, context of all together, drafts of each, threads, seconds) of tasks that have drafts; empty where none
    has any, and in a profile of an earlier version."""
    copy_to_host: AlphaBeta = field(default_factory=AlphaBeta)
    """Seconds of moving bytes of KV (all layers)."""
    copy_to_device: AlphaBeta = field(default_factory=AlphaBeta)
    tensor_parallel: AlphaBeta = field(default_factory=AlphaBeta)
    """gamma_T: a layer's collectives, by rows; zero on one device."""
    pipeline_parallel: AlphaBeta = field(default_factory=AlphaBeta)
    """gamma_P: a step's hand-overs between stages, by rows; zero on one device."""
    steps: tuple[StepSample, ...] = ()
    """Whole steps of a mixed load, or of a grid: overheads that no module shows are in the difference."""
    conditions: Conditions | None = None
    """The conditions of measuring; None in a profile of an earlier version."""
    is_coarse: bool = False
    """The profile was measured in little time, so that a server can begin, and is to be replaced."""

    def __post_init__(self) -> None:
        """Refuse measurements that no model can be made of.

        Raises:
            ValueError: A module lacks one of the states, or its rows are not of positive seconds.
        """
        for name in ("dense", "head", "prefill_attention", "decode_attention"):
            measured = getattr(self, name)
            if not isinstance(measured, Mapping) or set(measured) != set(STATES) or not all(measured.values()):
                raise ValueError(f"{name} needs measurements for {' and '.join(STATES)}")
            if any(not row[-1] > 0 for table in measured.values() for row in table):
                raise ValueError(f"{name} needs seconds above 0")

    @property
    def disturbances(self) -> list[str]:
        """The signs that the profile's times are of a busy machine, in words; empty if nothing shows that they are."""
        return self.conditions.disturbances() if self.conditions is not None else []

    def require(self, fingerprint: Fingerprint) -> Profile:
        """Return this profile if it was made for ``fingerprint``.

        Raises:
            ProfileMismatch: It was made for something else.
        """
        if differences := self.fingerprint.differences(fingerprint):
            raise ProfileMismatch(
                f"this latency profile was made for something else ({'; '.join(differences)}); "
                "make one with `python -m omniserve.profile`"
            )
        return self

    def write(self, path: Path) -> None:
        """Write the profile as JSON; its folder is made, and a reader never sees half a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, allow_nan=False)
        # One row of numbers a line: the file is read by people too.
        text = re.sub(r"\[\s+([^][{}]+?)\s+\]", lambda row: "[" + re.sub(r"\s+", " ", row[1]) + "]", text)
        text = re.sub(r"\{\s+([^][{}]+?)\s+\}", lambda row: "{" + re.sub(r"\s+", " ", row[1]) + "}", text)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text + "\n")
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a profile.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is not a profile, or one of another format.
        """
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            if (found := data.pop("format")) != FORMAT:
                raise ValueError(f"its format is {found!r}, this version reads {FORMAT}")
            conditions = data.pop("conditions", None)
            return cls(
                conditions=Conditions(**conditions) if conditions is not None else None,
                fingerprint=Fingerprint(**data.pop("fingerprint")),
                shape=_shape(data.pop("shape")),
                steps=tuple(
                    StepSample(features=BatchFeatures(**step["features"]), seconds=step["seconds"])
                    for step in data.pop("steps")
                ),
                **{name: _plain(value) for name, value in data.items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is no latency profile that can be used: {error}") from error


def _shape(data: dict[str, Any]) -> ModelShape:
    windows, chunks = (tuple((size, n) for size, n in data.get(name, ())) for name in ("windows", "chunks"))
    return ModelShape(num_layers=data["num_layers"], windows=windows, chunks=chunks)


def _plain(value: Any) -> Any:
    """Turn JSON's lists and objects back into tuples, AlphaBetas and dicts."""
    if isinstance(value, list):
        return tuple(_plain(item) for item in value)
    if isinstance(value, dict):
        return AlphaBeta(**value) if value.keys() == {"alpha_s", "beta_s"} else {k: _plain(v) for k, v in value.items()}
    return value


def cache_folder() -> Path:
    """Return where files are cached: ``omniserve`` in XDG_CACHE_HOME or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omniserve"


def default_folder() -> Path:
    """Return where profiles are cached: ``profiles`` in the cache folder."""
    return cache_folder() / "profiles"


def path_in(folder: Path, fingerprint: Fingerprint) -> Path:
    """Return the file name under which ``load_matching`` finds a profile."""
    return folder / f"{fingerprint.key}.json"


def load_matching(folder: Path, fingerprint: Fingerprint) -> Profile | None:
    """Return the folder's profile for this fingerprint, or None.

    A file's name says nothing: its fingerprint is compared. One that cannot be read, or that claims a name which is
    not its own, is logged and left out.
    """
    path = path_in(folder, fingerprint)
    return read_matching(path, fingerprint) if path.exists() else None


def read_matching(path: Path, fingerprint: Fingerprint) -> Profile | None:
    """Return a file's profile; None, and a warning, if it is none for this fingerprint."""
    try:
        return Profile.read(path).require(fingerprint)
    except (OSError, ValueError) as error:
        logger.warning("the latency profile %s is not used: %s", path, error)
        return None
