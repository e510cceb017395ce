"""Which device and which backend a rank uses: the only place that names their types."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pipeline.errors import ConfigError

__all__ = [
    "autocast",
    "backend_of",
    "bound",
    "generator_of",
    "on_host",
    "process_device",
    "set_threads",
    "synchronise",
    "thread_device",
    "timing_event",
    "transfer_backend",
    "uses_streams",
]

_CHOICES = ("auto", "cpu", "cuda")


# -- choosing ------------------------------------------------------------------------------------------------


def process_device(wanted: str, local_rank: int, backends: str | None = None) -> torch.device:
    """The device of a rank that is a process: an accelerator of its own, or the CPU.

    ``wanted`` is auto, cpu or cuda, ``local_rank`` counts the ranks of one host, and ``backends`` are those
    of a process group that exists already: ranks which it does not connect by their accelerators use the
    CPU.
    """
    if backends is not None and "nccl" not in backends:
        if wanted == "cuda":
            raise ConfigError(
                f"device is 'cuda', but the process group was initialized with {backends}: "
                "initialize it with 'cpu:gloo,cuda:nccl', leave that to make_mesh, or set device to cpu"
            )
        wanted = "cpu"
    if _kind(wanted) == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"rank {local_rank} of this host has no accelerator of its own, there are {count}: "
            f"start at most {count} processes a host (--nproc-per-node), or set device to cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def thread_device(wanted: str, rank: int) -> torch.device:
    """The device of a rank that is a thread; when there are more ranks than accelerators, they share them."""
    if _kind(wanted) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)  # of the calling thread
    return device


def _kind(wanted: str) -> str:
    if wanted not in _CHOICES:
        raise ConfigError(f"device is {wanted!r}; it must be one of {', '.join(_CHOICES)}")
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("device is 'cuda', but torch finds no such device here; set device to auto or cpu")
    return "cuda" if available and wanted != "cpu" else "cpu"


# -- transfers -----------------------------------------------------------------------------------------------


def backend_of(device: torch.device) -> str:
    """The torch.distributed backend of ranks on such devices; it also exchanges tensors in host memory."""
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"


def transfer_backend(device: torch.device) -> str:
    """The part of that backend which exchanges the tensors of the device itself."""
    return "gloo" if device.type == "cpu" else "nccl"


def bound(device: torch.device) -> torch.device | None:
    """The device to bind a process group to, so that it connects when it is made and not at its first use."""
    return None if device.type == "cpu" else device


def uses_streams(device: torch.device) -> bool:
    """Whether transfers are queued on the device, in one order for each connection and without tags."""
    return device.type != "cpu"


def on_host(tensor: Tensor) -> bool:
    return tensor.is_cpu


# -- computing -----------------------------------------------------------------------------------------------


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator of a device, from which its operators draw."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def set_threads(count: int) -> None:
    """Use ``count`` threads inside an operator; results are the same bits only for the same number."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Run the operators that profit from it in ``dtype``; None for all in the types they are given."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def synchronise(device: torch.device) -> None:
    """Wait until everything that was queued on the device has run."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def timing_event(device: torch.device) -> torch.Event | None:
    """An event to record on the current stream, with its time; None where a call has run when it returns."""
    return None if device.type == "cpu" else torch.Event(device, enable_timing=True)
