"""Pieces of huge pages: aligned, apart from one another, freed with their last user."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from orcaserve.kernels import cpu
from orcaserve.kernels.cpu import memory

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C compiler")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(memory._Chunk, "memory", torch.empty(0, dtype=torch.uint8))
    monkeypatch.setattr(memory._Chunk, "used", 0)


def test_pieces_do_not_overlap() -> None:
    sizes = [1, 100, 64, 700_000, 400_000, 3 << 20, 5]
    pieces = [memory.huge_pages(size).fill_(i) for i, size in enumerate(sizes)]
    for i, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        assert piece.numel() == size
        assert piece.data_ptr() % memory.ALIGNMENT == 0
        assert (piece == i).all()


def test_a_chunk_goes_with_its_last_piece() -> None:
    pieces = [memory.huge_pages(400_000) for _ in range(5)]  # two to a chunk
    chunk = weakref.ref(pieces[0]._base)
    assert pieces[1]._base is chunk()
    assert pieces[2]._base is not chunk()
    del pieces[0]
    gc.collect()
    assert chunk() is not None
    del pieces[0]
    gc.collect()
    assert chunk() is None
