"""What timing needs of a device."""

import torch


def synchronize(device: torch.device) -> None:
    """Waits until the device has done everything asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
