# ruff: noqa: SLF001 - what torch's own pickling uses has no public names
"""How PyTorch's objects travel. torch is never imported here: without it there is nothing to reduce.

Tensors are left to torch's own pickling, down to their storages. A storage travels once, as raw bytes out of band, so
tensors that share one still do on the other side, whatever their dtype, strides and views. A storage of an
accelerator travels as a CPU copy; on a rank it goes to that rank's own device, in the notebook it stays on the CPU.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from dataclasses import dataclass, field
from typing import Any, Final

from jupyter_ddp.travel.loading import current

_ACCELERATORS: Final = frozenset({"cuda", "mps", "xpu"})
_VIEW_NOTE_ABOVE: Final = 10_000_000


@dataclass(eq=False, slots=True)
class _Bytes:
    """A storage's bytes, one object for each storage, so that the pickler's memo keeps them together."""

    cpu: Any
    device: str

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        size = self.cpu.nbytes()
        if size == 0:
            return _storage, (b"", self.device)
        raw = (ctypes.c_char * size).from_address(self.cpu.data_ptr())
        raw.owner = self.cpu  # the bytes live as long as the buffer: it outlives the pickler
        return _storage, (pickle.PickleBuffer(raw), self.device)


@dataclass(slots=True)
class TorchReducer:
    """Reduces torch's objects for one pickler.

    Attributes:
        keep_device: Whether tensors of an accelerator go back to one (notebook to rank), or stay on the CPU.
        notes: Sentences about what changes on the way.
    """

    keep_device: bool
    notes: dict[str, None] = field(default_factory=dict)
    _storages: dict[tuple[str, int], tuple[Any, _Bytes]] = field(default_factory=dict)

    def __call__(self, obj: Any, name: str) -> Any | None:  # noqa: ANN401 - one branch a kind
        """Return the reduce value of an object of torch, or None to leave it to its own pickling.

        Args:
            obj: Any object.
            name: What is being pickled, for notes: `net`, "the value".
        """
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "UntypedStorage"):  # not there, or half imported
            return None
        if isinstance(obj, torch.Tensor):
            self._note_view(torch, obj, name)
            return _reduce_tensor(obj)
        if isinstance(obj, torch.storage.TypedStorage):
            return _typed, (self._bytes(obj._untyped_storage, name), obj.dtype)
        if isinstance(obj, torch.UntypedStorage):
            return _itself, (self._bytes(obj, name),)
        if isinstance(obj, torch.Generator):
            device = obj.device.type
            return _generator, (
                device if self.keep_device else "cpu",
                device,
                obj.get_state(),
                obj.initial_seed(),
            )
        if isinstance(obj, torch.nn.Module) and _is_ddp(type(obj)):
            self.notes[
                f"{name}: a DistributedDataParallel model travels as the model that it wraps (.module)"
            ] = None
            return _itself, (obj.module,)
        return None

    def _bytes(self, storage: Any, name: str) -> _Bytes:  # noqa: ANN401 - torch.UntypedStorage
        key = (storage.device.type, storage._cdata)
        if key not in self._storages:
            device = storage.device.type
            where = device
            if device != "cpu":
                if self.keep_device:
                    if device in _ACCELERATORS:
                        self.notes[
                            f"{name} is on {device}: a CPU copy travels, to each rank's own device"
                        ] = None
                else:
                    where = "cpu"
                    self.notes[f"{name} was on {device}: it comes back on the CPU"] = None
            cpu = storage if device == "cpu" else storage.cpu()
            self._storages[key] = (storage, _Bytes(cpu, where if where in _ACCELERATORS else "cpu"))
        return self._storages[key][1]

    def _note_view(self, torch: Any, tensor: Any, name: str) -> None:  # noqa: ANN401 - torch and a tensor of it
        if (
            not torch._C._has_storage(tensor)
            or tensor.layout is not torch.strided
            or tensor.device.type == "meta"
        ):
            return
        whole, part = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
        known = (tensor.device.type, tensor.untyped_storage()._cdata) in self._storages
        if whole > _VIEW_NOTE_ABOVE and part < whole // 4 and not known:
            size = f"{whole / 1e6:.0f} MB"
            self.notes[
                f"{name} has a view of a tensor of {size}, all of which travels; .clone() is smaller"
            ] = None


def _is_ddp(kind: type) -> bool:
    return any(
        base.__name__ == "DistributedDataParallel" and base.__module__.startswith("torch.nn.parallel")
        for base in kind.__mro__
    )


def _reduce_tensor(tensor: Any) -> Any:  # noqa: ANN401 - torch.Tensor; a reduce value
    """Reduce a tensor as torch does, with two repairs.

    ``.grad``, which torch drops, comes along: ``opt.step()`` in the cell would silently do nothing. The newer dtypes
    (uint16, float8 …) can be written by torch's pickling, but not read: it wants a typed storage.
    """
    reduced = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if not isinstance(reduced, tuple) or len(reduced) != 2:
        return reduced
    make, args = reduced
    if getattr(make, "__name__", "") == "_rebuild_tensor_v3":
        make, args = _rebuild_new_dtype, (make, *args)
    if tensor.is_leaf and tensor.grad is not None:
        return _rebuild_with_gradient, (make, args, tensor.grad)
    return make, args


def _rebuild_new_dtype(make: Any, storage: Any, *args: Any) -> Any:  # noqa: ANN401 - torch's function and its arguments
    import torch

    return make(_typed(storage, torch.uint8), *args)


def _rebuild_with_gradient(make: Any, args: tuple[Any, ...], gradient: Any) -> Any:  # noqa: ANN401
    tensor = make(*args)
    tensor.grad = gradient
    return tensor


def _itself(obj: Any) -> Any:  # noqa: ANN401 - anything
    return obj


def _storage(raw: Any, device: str) -> Any:  # noqa: ANN401 - a buffer; torch.UntypedStorage
    import torch

    if len(raw) == 0:
        return torch.UntypedStorage(0, device=_device(torch, device))
    if isinstance(raw, bytes):  # a read-only buffer kept in band
        raw = bytearray(raw)
    storage = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    target = _device(torch, device)
    return (
        storage
        if target == "cpu"
        else torch.empty(0, dtype=torch.uint8).set_(storage).to(target).untyped_storage()
    )


def _typed(storage: Any, dtype: Any) -> Any:  # noqa: ANN401 - torch's storages and dtype
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _generator(device: str, made_on: str, state: Any, seed: int) -> Any:  # noqa: ANN401 - torch.Generator
    import torch

    target = _device(torch, device)
    generator = torch.Generator(device=target)
    if target.split(":")[0] == made_on:
        generator.set_state(state)
    else:
        generator.manual_seed(seed)
        current().notes[f"a torch.Generator of {made_on} became one of the CPU, with the same seed"] = None
    return generator


def _device(torch: Any, device: str) -> str:  # noqa: ANN401 - the module
    """Return where a tensor that was on ``device`` goes in this process."""
    if device == "cpu":
        return "cpu"
    local_rank = current().local_rank
    if local_rank is not None:
        if device == "mps" and torch.backends.mps.is_available():
            return "mps"
        accelerator = getattr(torch, device, None)
        if device != "mps" and accelerator is not None and accelerator.is_available():
            if local_rank < accelerator.device_count():
                return f"{device}:{local_rank}"
            current().notes[
                f"this rank has no {device}:{local_rank}: tensors that were on {device} in the notebook are on the CPU"
            ] = None
            return "cpu"
    current().notes[f"no {device} here: tensors that were on {device} are on the CPU"] = None
    return "cpu"
