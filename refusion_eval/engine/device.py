"""Device synchronisation for timing."""

import torch


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
