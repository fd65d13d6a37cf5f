"""What a run is asked to be: `LaunchConfig`, frozen, validated, comparable, and readable from JSON.

What a field's value may be stands in `jupyter_ddp.config.fields`. Standard library only: agents import this module.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from jupyter_ddp.config.fields import FIELDS, MASK, field_name, normalise
from jupyter_ddp.config.forms import Pull, format_duration, parse_duration, parse_pull, parse_ranks
from jupyter_ddp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DEFAULTS",
    "FIELDS",
    "LaunchConfig",
    "Pull",
    "field_name",
    "format_duration",
    "normalise",
    "parse_duration",
    "parse_pull",
    "parse_ranks",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """What a run is asked to be. Fields are normalised and validated when it is made; see `normalise`.

    Attributes:
        backend: Where the ranks run: ``local``, ``sagemaker`` or another registered name.
        instance_count: Instances; locally, simulated ones on this machine.
        nproc_per_node: Ranks on each instance: a number, ``gpu``, ``cpu`` or ``auto``.
        protocol: The launcher: ``torchrun`` or ``mpirun``.
        instance_type: SageMaker's instance type; None takes SageMaker's own configuration.
        push: Names of variables to send; None sends what the cell uses, ``()`` sends none.
        pull: What comes back into the notebook, see `Pull`; ``"loss,acc@all"`` is understood.
        out: The variable that gets the `DistributedResult`, also of a failed run.
        env: Environment of the ranks; None as a value takes the kernel's value.
        show: Ranks whose text is shown and kept in the notebook; None shows all.
        timeout: Seconds from the moment when the first rank runs the cell; ``"30m"`` is understood.
        init_process_group: ``auto``, ``nccl`` or ``gloo`` starts ranks inside a default process group.
        distribution: SageMaker's distribution dictionary.
        name: A label of the run.
        detach: Return at once and leave the run going.
        fork: Import torch once and fork torchrun's ranks, where that is safe.
        inputs: Channel name to path or S3 address.
        checkpoints: Directory or S3 prefix that the ranks' checkpoints sync with.
        setup: Code that each rank runs first.
        start_timeout: Seconds in which all ranks must have started.
        interrupt_grace: Seconds that a rank has for its clean-up after an interrupt; 0 is none.
        sagemaker_options: What SageMaker's request takes besides.
    """

    backend: str = "local"
    instance_count: int = 1
    nproc_per_node: int | str = "auto"
    protocol: str = "torchrun"
    instance_type: str | None = None
    push: tuple[str, ...] | None = None
    pull: tuple[Pull, ...] = ()
    out: str | None = None
    env: dict[str, str | None] = field(default_factory=dict)
    show: tuple[int, ...] | None = None
    timeout: float | None = None
    init_process_group: str | None = None
    distribution: dict[str, Any] | None = None
    name: str | None = None
    detach: bool = False
    fork: bool = True
    inputs: dict[str, Any] = field(default_factory=dict)
    checkpoints: str | None = None
    setup: str = ""
    start_timeout: float = 300.0
    interrupt_grace: float = 30.0
    sagemaker_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in FIELDS:
            object.__setattr__(self, name, normalise(name, getattr(self, name)))
        if self.out and any(pull.name == self.out for pull in self.pull):
            rule = f"--out {self.out} binds the same name: choose another name for one of them"
            raise ConfigError("out", f"pull brings back {self.out}, but {rule}.")
        if isinstance(self.nproc_per_node, int):
            self.check_ranks(self.instance_count * self.nproc_per_node)

    def check_ranks(self, world_size: int) -> None:
        """Check ``pull`` and ``show`` against the number of ranks, once it is known.

        Raises:
            ConfigError: One of them names a rank that the run does not have.
        """
        pulled = [("pull", str(pull), pull.rank) for pull in self.pull if pull.rank != "all"]
        shown = [("show", str(rank), rank) for rank in self.show or ()]
        for name, text, rank in pulled + shown:
            if rank >= world_size:
                have = f"ranks 0 to {world_size - 1}" if world_size > 1 else "rank 0 only"
                raise ConfigError(
                    name, f"{name} is {text}, but the run has {have}: name one of those, or all."
                )

    def replace(self, **changes: object) -> LaunchConfig:
        """Return a copy with some fields changed.

        Raises:
            ConfigError: A field is unknown or a value impossible.
        """
        return dataclasses.replace(self, **{field_name(key): value for key, value in changes.items()})  # type: ignore[arg-type]

    def to_json(self, *, mask_env: bool = False) -> dict[str, Any]:
        """Return the fields as a JSON object that `from_json` reads; `mask_env` hides the values of ``env``."""
        out: dict[str, Any] = {name: getattr(self, name) for name in FIELDS}
        out["pull"] = [str(pull) for pull in self.pull]
        out["push"] = None if self.push is None else list(self.push)
        out["show"] = None if self.show is None else list(self.show)
        out["env"] = {
            key: MASK if mask_env and value is not None else value for key, value in self.env.items()
        }
        copy: dict[str, Any] = json.loads(json.dumps(out))
        return copy

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> LaunchConfig:
        """Return the configuration of a JSON object; fields that this version does not know are dropped.

        Raises:
            ConfigError: A value is impossible.
        """
        return cls(**{name: obj[name] for name in FIELDS if name in obj})


DEFAULTS: Final = LaunchConfig()
"""A configuration in which nothing was asked for."""
