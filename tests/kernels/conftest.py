"""Runs the Triton kernels on CPU tensors, inside triton's interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[[str], Any]]:
    """Imports a module of kernels.gpu such that its kernels run interpreted, whatever imported triton before.

    TRITON_INTERPRET is read when a kernel is decorated. What a launcher allocates is full of NaN, so an element that a
    kernel forgets to write does not go unseen.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from triton.runtime import interpreter

        restore = _mend(interpreter, patch)
        patch.setattr(torch, "empty", _poisoned(torch.empty))
        patch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
        yield lambda name: importlib.import_module(f"orcaserve.kernels.gpu.{name}")
        restore()


def _mend(interpreter: Any, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Three things about the interpreter of triton 3.9. Returns what undoes its changes to triton.language."""
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    # It replaces triton.language anew at every call of a device function and never puts it back: once is enough.
    scope = interpreter._patch_lang(tl.zeros.fn)
    call = lambda function, *a, **k: interpreter.InterpretedFunction(function.fn).rewrite()(*a, **k)  # noqa: E731
    patch.setattr(interpreter.InterpretedFunction, "__call__", call)
    # Where triton was imported before, its own device functions (tl.sum, tl.max) were not made for the interpreter.
    patch.setattr(JITFunction, "__call__", call)

    # It keeps bfloat16 as its 16 bits, and multiplies these as integers.
    dot = interpreter.InterpreterBuilder.create_dot

    def dot_with_bf16(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        wide = [builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(builder, *wide, *others)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_with_bf16)
    return scope.restore


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_poisoned(*arguments: Any, **options: Any) -> Tensor:
        tensor = allocate(*arguments, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    return allocate_poisoned
