"""Runs the Triton kernels on CPU tensors, inside triton's interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of kernels.gpu such that its kernels run interpreted, whatever imported triton before.

    TRITON_INTERPRET is read when a kernel is decorated; triton's own device functions (tl.sum, tl.max) may be
    decorated already and are then handed to the interpreter when they are called.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    monkeypatch.setattr(JITFunction, "__call__", lambda function, *a, **k: InterpretedFunction(function.fn)(*a, **k))
    yield lambda name: importlib.import_module(f"orcaserve.kernels.gpu.{name}")
