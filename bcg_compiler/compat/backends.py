"""Choices of the process that kernels depend on and Dynamo does not guard."""

import torch


def attention_kernels() -> tuple[bool, ...]:
    """Which kernels ``scaled_dot_product_attention`` may choose now (``torch.nn.attention.sdpa_kernel``)."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )
