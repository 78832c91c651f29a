"""Compiles every Triton kernel for H100/H200 (sm_90) and A100 (sm_80) on a machine without a GPU.

`python -m orcaserve.kernels.aot` prints registers, shared memory and spills of each, and ends with status 1 if a kernel
does not compile, does not fit the shared memory, or spills in a default configuration of attention.

The launchers themselves run, on tensors without storage (device "meta"), while triton's launch is replaced by a
compilation: what is built here, argument types, alignment and constants included, is what a GPU would be given.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.errors import CompilationError
from triton.runtime import jit
from triton.runtime.errors import PTXASError

from orcaserve.kernels.batch import AttentionBatch
from orcaserve.kernels.gpu import attention, gates, kv, norms, sampling

SHARED_MEMORY_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # that one program may ask for
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Built:
    """What became of one kernel of one case."""

    target: str
    case: str
    kernel: str
    registers: int = 0
    shared_bytes: int = 0
    spilled_bytes: int = 0
    seconds: float = 0.0
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration: a launcher's call on meta tensors."""

    name: str
    call: Callable[[int], object]  # given the major compute capability
    may_spill: bool = True
    is_default: bool = False


def cases() -> Iterator[Case]:
    yield from _attention_cases()
    for name, dtype in DTYPES.items():
        bf16 = name == "bf16"
        for hidden in (576, 4096, 16384):
            yield _case(f"rms_norm {hidden} {name}", _norm, hidden, dtype, False)
            yield _case(f"rms_norm+residual {hidden} {name}", _norm, hidden, dtype, True, default=bf16)
        yield _case(f"silu_mul {name}", _gate, gates.silu_mul, dtype, default=bf16)
        yield _case(f"gelu_tanh_mul {name}", _gate, gates.gelu_tanh_mul, dtype, default=bf16)
        for num_heads, num_kv_heads, head_dim in ((9, 3, 64), (32, 8, 128), (16, 8, 256), (32, 32, 80)):
            shape = f"{num_heads}:{num_kv_heads}x{head_dim} {name}"
            default = bf16 and head_dim == 128
            yield _case(f"rope_kv_write {shape}", _rope, num_heads, num_kv_heads, head_dim, dtype, default=default)
            yield _case(f"kv_write {shape}", _kv_write, num_kv_heads, head_dim, dtype, default=default)
        yield _case(f"copy_blocks {name}", _copy_blocks, dtype, default=bf16)
    yield _case("sample", _sample, default=True)
    yield _case("uniform", _uniform, default=True)


def _case(name: str, call: Callable[..., object], *arguments: object, default: bool = False) -> Case:
    return Case(name, lambda _capability: call(*arguments), is_default=default)


def _attention_cases() -> Iterator[Case]:
    """Dtypes and head sizes with the plain mask, then what a model family may add to it."""
    for name, dtype in DTYPES.items():
        for heads in ((9, 3, 64), (32, 32, 80), (32, 32, 96), (32, 8, 128), (16, 8, 256)):
            yield from _attention_pair(name, dtype, heads, default=name == "bf16" and heads[2] in (64, 128))
    families: tuple[tuple[tuple[int, int, int], dict[str, Any]], ...] = (
        ((32, 8, 128), {"window": 4096}),
        ((16, 8, 256), {"window": 4096, "softcap": 50.0}),
        ((64, 1, 128), {}),
        ((32, 32, 64), {}),
        ((64, 8, 128), {"block_size": 128}),
    )
    for heads, extras in families:
        yield from _attention_pair("bf16", torch.bfloat16, heads, default=False, **extras)
    for query_len, candidates in ((1, attention.DECODE_CANDIDATES), (512, attention.PREFILL_CANDIDATES)):
        for tiles in candidates:
            name = f"attention tiles {'x'.join(map(str, astuple(tiles)))}"
            yield _case(name, _attention, 0, torch.bfloat16, (32, 8, 128), query_len, 0, 0.0, 16, tiles)


def _attention_pair(
    dtype_name: str, dtype: torch.dtype, heads: tuple[int, int, int], default: bool, **extras: Any
) -> Iterator[Case]:
    """float32 may spill: it is there for comparisons, and its products take three times the registers."""
    extra = "".join(f" {name}={value}" for name, value in extras.items())
    for step, query_len in (("decode", 1), ("mixed", 512)):

        def call(capability: int, query_len: int = query_len) -> None:
            _attention(capability, dtype, heads, query_len, **extras)

        name = f"attention {step} {heads[0]}:{heads[1]}x{heads[2]} {dtype_name}{extra}"
        yield Case(name, call, may_spill=dtype == torch.float32, is_default=default)


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _pool(num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 16) -> Tensor:
    return _meta(2, 1024, num_kv_heads, block_size, head_dim, dtype=dtype)


def _batch(num_requests: int, num_tokens: int, max_query_len: int) -> AttentionBatch:
    int32, int64 = torch.int32, torch.int64
    return AttentionBatch(
        query_start=_meta(num_requests + 1, dtype=int32),
        context_lens=_meta(num_requests, dtype=int32),
        block_tables=_meta(num_requests, 256, dtype=int32),
        slot_mapping=_meta(num_tokens, dtype=int64),
        positions=_meta(num_tokens, dtype=int64),
        max_query_len=max_query_len,
        max_context_len=4096,
    )


def _attention(
    capability: int,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    query_len: int,
    window: int = 0,
    softcap: float = 0.0,
    block_size: int = 16,
    tiles: attention.Tiles | None = None,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    num_tokens = 8 + query_len - 1
    q = _meta(num_tokens, num_heads, head_dim, dtype=dtype)
    pool = _pool(num_kv_heads, head_dim, dtype, block_size)
    if tiles is None:
        tiles = attention.choose_tiles(q, num_kv_heads, query_len, capability)
    batch = _batch(8, num_tokens, query_len)
    attention.launch(q, pool, batch, head_dim**-0.5, window, softcap, tiles, num_workers=264)


def _norm(hidden: int, dtype: torch.dtype, with_residual: bool) -> None:
    x = _meta(64, hidden, dtype=dtype)
    norms.rms_norm(x, _meta(hidden, dtype=torch.float32), 1e-5, x if with_residual else None)


def _gate(operation: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    operation(*_meta(64, 2 * 1536, dtype=dtype).chunk(2, dim=1))


def _rope(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    fused = _meta(64, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype).unflatten(1, (-1, head_dim))
    q, k, v = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    table = _meta(4096, head_dim, dtype=torch.float32)
    kv.rope_kv_write(q, k, v, table, _pool(num_kv_heads, head_dim, dtype), _batch(64, 64, 1))


def _kv_write(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    k = _meta(64, num_kv_heads, head_dim, dtype=dtype)
    kv.kv_write(k, k, _pool(num_kv_heads, head_dim, dtype), _meta(64, dtype=torch.int64))


def _copy_blocks(dtype: torch.dtype) -> None:
    kv.copy_blocks(_pool(8, 128, dtype), _meta(4, 2, dtype=torch.int64))


def _sample() -> None:
    logits, column = _meta(64, 49_152, dtype=torch.float32), _meta(64, dtype=torch.float32)
    sampling.sample(logits, column, _meta(64, dtype=torch.int32), column, column, column)


def _uniform() -> None:
    column = _meta(64, dtype=torch.int64)
    sampling.uniform(column, column, column)


@contextmanager
def compiling_for(capability: int, on_kernel: Callable[[str, Any, float], None]) -> Iterator[None]:
    """While it lasts a launch compiles for the target and hands (kernel's name, what was compiled, seconds) on."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        begin = time.perf_counter()
        options["debug"] = False
        bind = jit.create_function_from_signature(function.signature, function.params, backend)
        bound, specialization, _ = bind(*args, **options)
        parsed, signature, constants, attributes = function._pack_args(backend, options, bound, specialization, None)
        source = ASTSource(function, signature, constants, attributes)
        compiled = triton.compile(source, target=target, options=parsed.__dict__)
        on_kernel(function.__name__, compiled, time.perf_counter() - begin)

    launch = jit.JITFunction.run
    jit.JITFunction.run = compile_only
    try:
        yield
    finally:
        jit.JITFunction.run = launch


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of its stack, which is where ptxas spills to."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", told.stdout)[-1]
    return int(registers), int(stack)


def build(case: Case, capability: int) -> list[Built]:
    """Compiles the kernels of one case; a kernel that fails ends the case with a `fault`."""
    built: list[Built] = []
    target = f"sm_{capability}"

    def on_kernel(kernel: str, compiled: Any, seconds: float) -> None:
        registers, spilled = resource_usage(compiled.asm["cubin"])
        shared, fault = compiled.metadata.shared, ""
        if shared > SHARED_MEMORY_BYTES[capability]:
            fault = f"needs {shared} bytes of shared memory, there are {SHARED_MEMORY_BYTES[capability]}"
        elif spilled and not case.may_spill:
            fault = f"spills {spilled} bytes a thread"
        built.append(Built(target, case.name, kernel, registers, shared, spilled, seconds, fault))

    try:
        with compiling_for(capability, on_kernel):
            case.call(capability // 10)
    except (CompilationError, PTXASError, RuntimeError) as error:
        built.append(Built(target, case.name, "?", fault=f"{type(error).__name__}: {error}"))
    return built


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m orcaserve.kernels.aot", description=__doc__.split("\n")[0])
    parser.add_argument("--default-only", action="store_true", help="the default configurations alone, as CI does")
    parser.add_argument("--arch", type=int, nargs="+", default=[90, 80], choices=sorted(SHARED_MEMORY_BYTES))
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: kernels would be interpreted, not compiled")
    built: list[Built] = []
    print(f"{'target':7}{'case':50}{'kernel':20}{'registers':>10}{'shared':>9}{'spilled':>9}{'s':>6}")
    for capability, case in product(options.arch, [c for c in cases() if c.is_default or not options.default_only]):
        for kernel in build(case, capability):
            built.append(kernel)
            print(f"{kernel.target:7}{kernel.case:50}{kernel.kernel:20}{kernel.registers:>10}{kernel.shared_bytes:>9}"
                  f"{kernel.spilled_bytes:>9}{kernel.seconds:>6.1f}  {kernel.fault}")  # fmt: skip
    faults = [asdict(kernel) for kernel in built if kernel.fault]
    print(json.dumps({"kernels": len(built), "triton": triton.__version__, "faults": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
