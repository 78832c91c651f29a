"""CUDA graphs of the decode step: one per batch size, so that a step costs one launch instead of hundreds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from orcaserve.kernels.batch import AttentionBatch
from orcaserve.workers.batch import StepBatch
from orcaserve.workers.compiled import CompiledDecode
from orcaserve.workers.models.decoder import Decoder


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4 and the multiples of 8 up to the most decodes that a step can have."""
    return sorted({size for size in (1, 2, 4, *range(8, max_num_seqs + 1, 8), max_num_seqs) if size <= max_num_seqs})


class DecodeGraphs:
    """Graphs over inputs of fixed address; a step of fewer requests runs the next larger one, padded.

    A padding request has context 0 and slot -1: it reads no key and writes none.
    """

    def __init__(
        self,
        model: Decoder,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        compiled: CompiledDecode | None = None,
    ) -> None:
        self.forward = model if compiled is None else compiled
        self.sizes = graph_sizes(max_num_seqs)
        self.max_model_len = max_model_len
        max_blocks = -(-max_model_len // model.kv_caches[0].shape[3])
        self.ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.slot_mapping = torch.full((max_num_seqs,), -1, dtype=torch.int64, device=device)
        self.context_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self.query_start = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(self) -> None:
        """Largest first, so that the smaller ones fit into its memory pool."""
        pool = None
        for size in reversed(self.sizes):
            self._forward(size)  # compiles the kernels, outside the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden = self._forward(size)
            pool = graph.pool()
            self.graphs[size] = (graph, hidden)

    def run(self, batch: StepBatch) -> Tensor:
        """The hidden states of a batch of decodes alone."""
        num_requests = len(batch.slots)
        size = next(size for size in self.sizes if size >= num_requests)
        self._fill(self.ids, batch.input_ids, size, 0)
        self._fill(self.positions, batch.positions, size, 0)
        self._fill(self.slot_mapping, batch.slot_mapping, size, -1)
        self._fill(self.context_lens, batch.context_lens, size, 0)
        width = batch.block_tables.shape[1]
        self.block_tables[:num_requests, :width] = torch.from_numpy(batch.block_tables).to(self.ids.device)
        graph, hidden = self.graphs[size]
        graph.replay()
        return hidden[:num_requests]

    def _fill(self, target: Tensor, values: np.ndarray, size: int, padding: int) -> None:
        target[: len(values)] = torch.from_numpy(values).to(target.device, non_blocking=True)
        target[len(values) : size] = padding

    def _forward(self, size: int) -> Tensor:
        batch = AttentionBatch(
            query_start=self.query_start[: size + 1],
            context_lens=self.context_lens[:size],
            block_tables=self.block_tables[:size],
            slot_mapping=self.slot_mapping[:size],
            positions=self.positions[:size],
            max_query_len=1,
            max_context_len=self.max_model_len,
        )
        return self.forward(self.ids[:size], batch, None)
