"""Safetensors into a sharded model: each rank maps the files and copies its own slices, nothing more."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from orcaserve.workers.errors import ModelLoadError
from orcaserve.workers.layers import Layer, Part, settle

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = ("F32", "F16", "BF16")
# Tables that old checkpoints carry along although they follow from the config.
DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)


class Checkpoint:
    """The safetensors files of a model directory. Opening reads and checks every header, so damage shows at once."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self.used: set[str] = set()
        index = model_dir / INDEX
        if index.is_file():
            self._open_indexed(index)
        elif (model_dir / SINGLE).is_file():
            self._open(SINGLE)
        else:
            raise ModelLoadError(
                str(model_dir), "", f"neither {INDEX} nor {SINGLE} is there (safetensors alone are read)"
            )

    def read(self, part: Part) -> torch.Tensor:
        """This rank's piece. Raises ModelLoadError."""
        if part.name not in self._file_of:
            raise ModelLoadError(str(self.model_dir), part.name, "the model needs it and the checkpoint lacks it")
        file = self._file_of[part.name]
        whole = self._files[file].get_slice(part.name)
        shape = tuple(whole.get_shape())
        if shape != part.shape:
            raise self._error(part.name, f"shape {list(shape)}, but the config asks for {list(part.shape)}")
        if whole.get_dtype() not in DTYPES:
            raise self._error(part.name, f"dtype {whole.get_dtype()} is a quantisation that is not supported")
        self.used.add(part.name)
        try:
            return whole[part.source]
        except SafetensorError as error:
            raise self._error(part.name, str(error)) from error

    def refuse_leftovers(self, tied_head: str | None) -> None:
        """Raises ModelLoadError if a tensor was not used. `tied_head` may be there and is then not needed."""
        left = set(self._file_of) - self.used - {tied_head}
        left = {name for name in left if not name.endswith(DERIVED_SUFFIXES)}
        if left:
            some = ", ".join(sorted(left)[:5])
            raise self._error(min(left), f"{len(left)} tensors of the checkpoint belong to no parameter: {some}")

    def _error(self, name: str, reason: str) -> ModelLoadError:
        return ModelLoadError(str(self.model_dir / self._file_of[name]), name, reason)

    def _open_indexed(self, index: Path) -> None:
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            entries = list(weight_map.items())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(str(index), "", f"not a readable index: {type(error).__name__}: {error}") from error
        listed: dict[str, list[str]] = defaultdict(list)
        for name, file in entries:
            if not file or Path(file).name != file or file == "..":
                raise ModelLoadError(str(index), name, f"points outside the model's folder: {file!r}")
            listed[file].append(name)
        for file, names in listed.items():
            if not (self.model_dir / file).is_file():
                raise ModelLoadError(
                    str(self.model_dir / file), names[0], f"missing; the index has {len(names)} tensors in it"
                )
            self._open(file)
            for name in names:
                if self._file_of.get(name) != file:
                    raise ModelLoadError(
                        str(self.model_dir / file), name, "the index has it in this file, which lacks it"
                    )

    def _open(self, file: str) -> None:
        path = self.model_dir / file
        try:
            opened = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(str(path), "", f"damaged or truncated: {error}") from error
        self._files[file] = opened
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            if name in self._file_of:
                raise ModelLoadError(str(path), name, f"it is in {self._file_of[name]} too")
            self._file_of[name] = file


def load(model: nn.Module, checkpoint: Checkpoint, device: torch.device, tied_head: str | None) -> None:
    """Fill and finish every layer, one after the other, so that no more than one is in memory twice.

    Ends with the proof that every parameter was filled exactly once and that no tensor is left over.
    """
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, Layer):
                _fill(layer, checkpoint, device)
                layer.finish()
    left = [name for name, _ in model.named_parameters()]
    assert not left, f"layers that were not finished: {left}"
    checkpoint.refuse_leftovers(tied_head)
    settle(model)


def _fill(layer: Layer, checkpoint: Checkpoint, device: torch.device) -> None:
    filled: dict[str, list[slice]] = defaultdict(list)
    layer.to_empty(device=device, recurse=False)
    for part in layer.parts():
        getattr(layer, part.param)[part.rows].copy_(checkpoint.read(part))
        filled[part.param].append(part.rows)
    for name, param in layer.named_parameters(recurse=False):
        _assert_tiled(f"{type(layer).__name__}.{name}", filled[name], param.shape[0])


def _assert_tiled(name: str, rows: list[slice], total: int) -> None:
    """The slices, in order, cover all rows once."""
    end = 0
    for piece in sorted(rows, key=lambda piece: piece.start):
        assert piece.start == end, f"{name}: rows {end} to {piece.start} are filled twice or never"
        end = piece.stop
    assert end == total, f"{name}: rows {end} to {total} are never filled"
