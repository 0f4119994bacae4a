"""FlashInfer 0.6.4 as it is documented, in torch: its signatures, what ``plan`` demands, what ``run`` reads."""

import types
from typing import Any

import pytest
import torch
from torch import Tensor


class Wrapper:
    """What both kinds have in common. A run reads only buffers of fixed addresses and the host's numbers."""

    def __init__(self, workspace: Tensor, use_cuda_graph: bool, buffers: list[Tensor | None]) -> None:
        assert workspace.dtype == torch.uint8
        assert not use_cuda_graph or all(buffer is not None for buffer in buffers)
        self.use_cuda_graph, self.buffers = use_cuda_graph, buffers
        self.plans = 0
        self._plan_info: list[int] = []
        self._most_rows: int | None = None

    def _planned(self, given: list[Tensor]) -> None:
        self.plans += 1
        assert all(tensor.dtype == torch.int32 for tensor in given)
        if not self.use_cuda_graph:
            self.buffers = [tensor.clone() for tensor in given]
            return
        for buffer, tensor in zip(self.buffers, given, strict=True):
            assert buffer is not None
            if tensor is given[2]:
                buffer[: len(tensor)].copy_(tensor)
            else:
                buffer.copy_(tensor)  # fails for another number of requests

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, last: Tensor, page_size: int, scale: float) -> Tensor:
        """``q`` ``[rows, heads, width]``, ``keys`` and ``values`` ``[pages, page_size, groups, width]``; rows of no
        request are NaN.
        """
        rows, starts, pages, _ = (b for b in self.buffers if b is not None)
        at = torch.arange(q.shape[0])
        request = torch.searchsorted(rows[1:].contiguous(), at, right=True).clamp(max=len(rows) - 2)
        contexts = ((starts[1:] - starts[:-1] - 1).clamp(min=0) * page_size + last)[request]
        position = contexts - (rows[1:][request] - at)
        k, v = (cache[pages].flatten(0, 1).float() for cache in (keys, values))
        place = torch.arange(len(k)) - starts[request][:, None] * page_size
        seen = (place >= 0) & (place <= position[:, None])
        if self.window_left >= 0:
            seen &= place >= position[:, None] - self.window_left
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = torch.einsum("thd,shd->hts", q.float(), k) * scale
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        made = torch.einsum("hts,shd->thd", shares, v)
        return torch.where((at < rows[-1])[:, None, None], made, torch.nan)

    window_left = -1


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
    ) -> None:
        assert kv_layout == "NHD"
        buffers = [qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf]
        super().__init__(float_workspace_buffer, use_cuda_graph, buffers)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        assert causal and sm_scale is not None
        if self.use_cuda_graph:
            rows = int(qo_indptr[-1])
            self._most_rows = rows if self._most_rows is None else self._most_rows
            if rows > self._most_rows:
                raise ValueError("The total number of rows in qo_indptr cannot exceed the number set at first.")
            if len(qo_indptr) - 1 > self._most_rows:
                raise ValueError("the number of tiles wraps")
        self._planned([qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len])
        self.window_left, self.scale, self.page_size, self.dtype = window_left, sm_scale, page_size, q_data_type
        self._plan_info = [self._most_rows or int(qo_indptr[-1]), len(qo_indptr) - 1]

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        keys, values = paged_kv_cache
        assert q.dtype == keys.dtype == values.dtype == out.dtype == self.dtype
        made = self._attend(q, keys, values, self.buffers[3], self.page_size, self.scale)  # type: ignore[arg-type]
        return _write_live(out, made)


class BatchMLAPagedAttentionWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, use_cuda_graph, [qo_indptr, kv_indptr, kv_indices, kv_len_arr])

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        lengths = qo_indptr[1:] - qo_indptr[:-1]
        assert (kv_len_arr >= lengths).all(), "a row without a key"
        self._planned([qo_indptr, kv_indptr, kv_indices, kv_len_arr])
        self.scale, self.page_size = sm_scale, page_size
        clusters = 2 if int(qo_indptr[-1]) * num_heads // len(lengths) > 64 else 1
        self._plan_info = [clusters, 132 // clusters]

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, *, out: Tensor) -> Tensor:
        pages = self.buffers[1][1:] - self.buffers[1][:-1]  # type: ignore[index]
        last = self.buffers[3] - (pages - 1).clamp(min=0) * self.page_size  # type: ignore[operator]
        q, keys = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1)[:, :, None]
        made = self._attend(q, keys, ckv_cache[:, :, None], last, self.page_size, self.scale)
        return _write_live(out, made)


def _write_live(out: Tensor, made: Tensor) -> Tensor:
    """Rows of no request stay as they are."""
    return out.copy_(torch.where(made.isnan(), out.float(), made))


@pytest.fixture
def fake_flashinfer(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Installs the fake library. It counts as available on the CPU too."""
    from bcg_compiler.models.layers import flashinfer as ours

    library, mla = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.mla")
    library.__version__ = ours.MINIMUM  # type: ignore[attr-defined]
    library.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    mla.BatchMLAPagedAttentionWrapper = BatchMLAPagedAttentionWrapper  # type: ignore[attr-defined]
    library.mla = mla  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", library)
    monkeypatch.setitem(__import__("sys").modules, "flashinfer.mla", mla)
    ours._unplanned.cache_clear()
    return library
