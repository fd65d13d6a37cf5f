"""One trait for each field of a `LaunchConfig`: ``c.DistributedMagics.nproc_per_node = 4``, ``%config`` and files."""

from __future__ import annotations

from typing import Any, Final

from traitlets import TraitError, TraitType
from traitlets.config import Configurable

from jupyter_ddp.config import DEFAULTS, FIELDS, normalise
from jupyter_ddp.errors import ConfigError
from jupyter_ddp.line.flags import FLAGS

_HELP: Final = {
    flag.field: f"{flag.short}: {flag.help}."
    for flag in reversed(FLAGS)
    if flag.metavar or flag.field in ("detach", "fork")
} | {
    "inputs": "Channel name to path or S3 address; the ranks find them as SM_CHANNEL_<NAME>.",
    "checkpoints": "Where the ranks' checkpoints are kept: a directory, or an S3 prefix.",
    "setup": "Code that each rank runs before the cell.",
    "start_timeout": "Time in which all ranks must have started.",
    "interrupt_grace": "Time that a rank has for its clean-up after an interrupt.",
    "sagemaker_options": "What SageMaker's request takes besides.",
}


class FieldTrait(TraitType[Any, Any]):
    """A trait that takes what the field of a `LaunchConfig` takes, and holds its normal form."""

    def __init__(self, field: str) -> None:
        self.field = field
        super().__init__(getattr(DEFAULTS, field), help=_HELP[field])
        self.tag(config=True)

    def validate(self, obj: Any, value: Any) -> Any:  # noqa: ANN401, ARG002 - the signature is traitlets'
        """Return the value in its normal form.

        Raises:
            TraitError: It is impossible; the sentence says why.
        """
        try:
            return normalise(self.field, value)
        except ConfigError as error:
            raise TraitError(str(error)) from None

    def from_string(self, s: str) -> Any:  # noqa: ANN401 - the signature is traitlets'
        """Return the value that a command line or an environment variable means."""
        return s

    def info(self) -> str:
        """Return what the trait takes, for messages of traitlets."""
        return _HELP[self.field]


class LaunchTraits(Configurable):
    """The defaults of all runs, below the panel and above those of `LaunchConfig`."""

    backend = FieldTrait("backend")
    instance_count = FieldTrait("instance_count")
    nproc_per_node = FieldTrait("nproc_per_node")
    protocol = FieldTrait("protocol")
    instance_type = FieldTrait("instance_type")
    push = FieldTrait("push")
    pull = FieldTrait("pull")
    out = FieldTrait("out")
    env = FieldTrait("env")
    show = FieldTrait("show")
    timeout = FieldTrait("timeout")
    init_process_group = FieldTrait("init_process_group")
    distribution = FieldTrait("distribution")
    name = FieldTrait("name")
    detach = FieldTrait("detach")
    fork = FieldTrait("fork")
    inputs = FieldTrait("inputs")
    checkpoints = FieldTrait("checkpoints")
    setup = FieldTrait("setup")
    start_timeout = FieldTrait("start_timeout")
    interrupt_grace = FieldTrait("interrupt_grace")
    sagemaker_options = FieldTrait("sagemaker_options")

    @property
    def changed_fields(self) -> dict[str, Any]:
        """The fields whose trait does not have its default."""
        values = {name: getattr(self, name) for name in FIELDS}
        return {name: value for name, value in values.items() if value != getattr(DEFAULTS, name)}
