"""Between the host and the device without waiting for either."""

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device. On a CPU it shares the array's memory; elsewhere the copy is enqueued behind
    what the device has to do, and the array may change at once."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host. From an accelerator the copy is enqueued, and may be read once the device has come as far
    as that; see `Marker`."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Marker:
    """A place in the work of the device: all that was enqueued before it was made."""

    def __init__(self, device: torch.device) -> None:
        self._event = None if device.type == "cpu" else torch.cuda.Event()  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Return once the device has come here."""
        if self._event is not None:
            self._event.synchronize()
