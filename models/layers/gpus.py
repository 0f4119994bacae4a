"""What a kernel needs of the machine."""

from importlib.util import find_spec

import torch


def lacking(device: torch.device, capability: tuple[int, int], *, triton: bool = False) -> str:
    """What is not there: an NVIDIA GPU, of at least this compute capability, and Triton if asked for; "" if all is."""
    if device.type != "cuda" or torch.version.hip:
        return "it needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < capability:
        return f"it needs a GPU of compute capability {'.'.join(map(str, capability))} or newer"
    if triton and find_spec("triton") is None:
        return "Triton is not installed: pip install 'bcg-compiler[triton]'"
    return ""
