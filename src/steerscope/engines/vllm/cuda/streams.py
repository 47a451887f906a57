"""CUDA streams, for what is done beside every step."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class Here:
    """The stream that runs forwards. To ask torch for it takes longer than to record an event."""

    def __init__(self, device: torch.device) -> None:
        self._known = torch.cuda.current_stream(device)

    def __call__(self) -> torch.cuda.Stream:
        device = self._known.device_index
        if torch._C._cuda_getCurrentRawStream(device) != self._known.cuda_stream:
            self._known = torch.cuda.current_stream(device)
        return self._known


@contextmanager
def aside(here: torch.cuda.Stream, stream: torch.cuda.Stream) -> Iterator[None]:
    """What is launched goes to this stream, and from then on again to the one that is known to be current."""
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(here)


def sent(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """On its way to the device, behind what this stream was told before."""
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
