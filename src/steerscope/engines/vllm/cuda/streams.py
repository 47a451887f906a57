"""Work on CUDA streams beside the forward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CurrentStream:
    """The stream that runs forwards, cached: asking torch for it takes longer than recording an event."""

    def __init__(self, device: torch.device) -> None:
        self._known = torch.cuda.current_stream(device)

    def __call__(self) -> torch.cuda.Stream:
        device = self._known.device_index
        if torch._C._cuda_getCurrentRawStream(device) != self._known.cuda_stream:
            self._known = torch.cuda.current_stream(device)
        return self._known


@contextmanager
def on_stream(current: torch.cuda.Stream, stream: torch.cuda.Stream) -> Iterator[None]:
    """Launch on `stream` inside the block, and on `current` again after it."""
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(current)
