"""How long one model step takes, from first principles: bytes over bandwidth, FLOPs over rate, all-reduce, launches.

    linears      max(weight and activation bytes / bandwidth, 2 x weights x tokens / rate)
    head         the same over the rows that are sampled
    attention    KV bytes read / bandwidth + score and value FLOPs of the prefill chunks / rate
    all-reduce   two a layer: latency + bytes x 2 (n - 1) / n / bus bandwidth
    launches     kernels x gap between kernels, and a fixed cost of the step on the host

Each device constant names its source. `calibrate` replaces the efficiencies and overheads by those that fit a log.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from orcaserve.loadtest.model_shape import ModelShape
from orcaserve.loadtest.steps import StepLog, StepWork


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator and its links. Efficiencies are shares of the data sheet that real kernels reach."""

    name: str
    memory_bytes: float
    bandwidth: float  # bytes a second, data sheet
    flops: float  # dense bf16 a second, data sheet
    link_bandwidth: float  # all-reduce bus bandwidth, bytes a second
    link_latency_s: float  # of one small all-reduce
    memory_efficiency: float
    flops_efficiency: float
    kernel_gap_s: float
    step_overhead_s: float
    token_overhead_s: float = 0.0  # per computed token: norms, rope, copies
    row_overhead_s: float = 0.0  # per sampled row: sampling, and its token's way back
    kv_efficiency: float | None = None  # shares that attention reaches; None: as the linears do
    attention_flops_efficiency: float | None = None
    source: str

    @property
    def attention_efficiencies(self) -> tuple[float, float]:
        """Of memory and of arithmetic."""
        return (
            self.memory_efficiency if self.kv_efficiency is None else self.kv_efficiency,
            self.flops_efficiency if self.attention_flops_efficiency is None else self.attention_flops_efficiency,
        )


_NVIDIA = (
    "memory 0.90: device-to-device copy and STREAM triad on H100 reach 3.02 to 3.09 of 3.35 TB/s (CUDA events), less a "
    "tenth for skinny matrix products; matmul 0.75: large cuBLAS bf16 products reach 0.70 to 0.80 of the dense peak; "
    "kernel gap 1.5 us and 0.5 ms a step on the host: assumptions for CUDA graphs with overlapped planning"
)
H100 = Device(
    name="h100",
    memory_bytes=80e9,
    bandwidth=3.35e12,
    flops=989e12,
    link_bandwidth=366e9,
    link_latency_s=11e-6,
    memory_efficiency=0.81,
    flops_efficiency=0.75,
    kernel_gap_s=1.5e-6,
    step_overhead_s=0.5e-3,
    source="NVIDIA H100 SXM data sheet (80 GB, 3.35 TB/s, 989 TFLOPS dense bf16, NVLink 900 GB/s); all-reduce 366 GB/s "
    "bus bandwidth: nccl-tests on 4xH100 (nccl-collectives-bench, 2026); latency of a small one 11 us: an assumption, "
    f"between a one-shot kernel's and NCCL's on NVLink; {_NVIDIA}",
)
H200 = Device(
    name="h200",
    memory_bytes=141e9,
    bandwidth=4.8e12,
    flops=989e12,
    link_bandwidth=366e9,
    link_latency_s=11e-6,
    memory_efficiency=0.81,
    flops_efficiency=0.75,
    kernel_gap_s=1.5e-6,
    step_overhead_s=0.5e-3,
    source=f"NVIDIA H200 SXM data sheet (141 GB, 4.8 TB/s, 989 TFLOPS dense bf16); links as H100; {_NVIDIA}",
)
A100 = Device(
    name="a100",
    memory_bytes=80e9,
    bandwidth=2.039e12,
    flops=312e12,
    link_bandwidth=235e9,
    link_latency_s=13e-6,
    memory_efficiency=0.81,
    flops_efficiency=0.75,
    kernel_gap_s=1.5e-6,
    step_overhead_s=0.5e-3,
    source="NVIDIA A100 80 GB SXM data sheet (2,039 GB/s, 312 TFLOPS dense bf16, NVLink 600 GB/s); all-reduce scaled "
    f"from H100's share of its links (0.78 of 300 GB/s a direction), latency likewise an assumption; {_NVIDIA}",
)
CPU = Device(
    name="cpu",
    memory_bytes=16e9,
    bandwidth=40e9,
    flops=450e9,
    link_bandwidth=8e9,
    link_latency_s=60e-6,
    memory_efficiency=0.9,
    flops_efficiency=0.5,
    kernel_gap_s=5e-6,
    step_overhead_s=0.3e-3,
    token_overhead_s=0.0,
    source="two Zen 4 cores: 36 to 42 GB/s of memory reads measured; AVX-512 bf16 peak 64 FLOPs a cycle and core at "
    "3.5 GHz; efficiencies and overheads are assumptions until calibrated",
)
DEVICES = {device.name: device for device in (H100, H200, A100, CPU)}

KERNELS_PER_LAYER = 9  # 4 linears (QKV and gate-up fused), attention, rope + KV write, 2 norms, activation


class StepTime:
    """Seconds of a step for one model on one group; the coefficients are worked out once, a call is a dozen flops."""

    def __init__(self, shape: ModelShape, device: Device, tensor_parallel_size: int) -> None:
        self.shape = shape
        self.device = device
        self.tensor_parallel_size = tp = tensor_parallel_size
        value, layers, hidden = shape.bytes_per_value, shape.num_hidden_layers, shape.hidden_size
        bandwidth = device.bandwidth * device.memory_efficiency
        rate = device.flops * device.flops_efficiency
        self._weights_s = shape.layer_params * value / tp / bandwidth
        self._activation_s = layers * value * (6 * hidden + 3 * shape.intermediate_size / tp) / bandwidth
        self._linear_s = 2 * shape.layer_params / tp / rate
        self._head_weights_s = shape.head_params * value / tp / bandwidth
        self._head_linear_s = 2 * shape.head_params / tp / rate
        self._kv_s = shape.kv_bytes_per_token(tp) / (device.bandwidth * device.attention_efficiencies[0])
        pair_flops = 4 * layers * shape.num_attention_heads * shape.head_dim / tp
        self._pair_s = pair_flops / (device.flops * device.attention_efficiencies[1])
        num_reduces = 2 * layers if tp > 1 else 0
        self._reduce_s = num_reduces * 2 * (tp - 1) / tp * hidden * value / device.link_bandwidth
        self._fixed_s = (
            device.step_overhead_s
            + layers * KERNELS_PER_LAYER * device.kernel_gap_s
            + num_reduces * device.link_latency_s
        )
        self._token_s = device.token_overhead_s
        self._row_s = device.row_overhead_s

    def seconds(self, tokens: int, rows: int, kv_tokens: int, prefill_pairs: int) -> float:
        """Time of a step; the arguments are sums over its slots, as in StepWork."""
        linear = max(self._weights_s + self._activation_s * tokens, self._linear_s * tokens)
        head = max(self._head_weights_s, self._head_linear_s * rows) if rows else 0.0
        attention = self._kv_s * kv_tokens + self._pair_s * prefill_pairs
        return (
            self._fixed_s + linear + head + attention + (self._reduce_s + self._token_s) * tokens + self._row_s * rows
        )

    def all_seconds(self, log: StepLog) -> NDArray[np.float64]:
        """`seconds` of each step."""
        tokens = np.add(log.prefill_tokens, log.decode_tokens) + np.asarray(log.padding_tokens)
        rows = np.asarray(log.rows)
        linear = np.maximum(self._weights_s + self._activation_s * tokens, self._linear_s * tokens)
        head = np.where(rows > 0, np.maximum(self._head_weights_s, self._head_linear_s * rows), 0.0)
        attention = self._kv_s * np.asarray(log.kv_tokens) + self._pair_s * np.asarray(log.prefill_pairs)
        per_token = (self._reduce_s + self._token_s) * tokens
        return self._fixed_s + linear + head + attention + per_token + self._row_s * rows

    def decode_seconds(self, rows: int, kv_tokens: int, num_steps: int) -> list[float]:
        """`seconds` of each of some steps in which the same rows decode: the contexts grow, nothing else changes."""
        linear = max(self._weights_s + self._activation_s * rows, self._linear_s * rows)
        base = self._fixed_s + linear + max(self._head_weights_s, self._head_linear_s * rows)
        kv_s, last = self._kv_s, (self._reduce_s + self._token_s) * rows
        sampling = self._row_s * rows
        return [base + kv_s * kv + last + sampling for kv in range(kv_tokens, kv_tokens + num_steps * rows, rows)]

    def parts_ms(self, work: StepWork) -> dict[str, float]:
        """Where the time goes, for a table."""
        tokens = work.tokens
        head = max(self._head_weights_s, self._head_linear_s * work.rows) if work.rows else 0.0
        return {
            "linears": max(self._weights_s + self._activation_s * tokens, self._linear_s * tokens) * 1e3,
            "head": head * 1e3,
            "attention": (self._kv_s * work.kv_tokens + self._pair_s * work.prefill_pairs) * 1e3,
            "sampling": self._row_s * work.rows * 1e3,
            "all-reduce and launches": (self._fixed_s + (self._reduce_s + self._token_s) * tokens) * 1e3,
        }


# Attention is taken to reach what the linears reach unless the steps say otherwise: a factor of e costs this much.
DOUBT = 0.01
_FITTED = (
    "memory_efficiency",
    "flops_efficiency",
    "kv_efficiency",
    "attention_flops_efficiency",
    "step_overhead_s",
    "token_overhead_s",
    "row_overhead_s",
)


def calibrate(shape: ModelShape, device: Device, tensor_parallel_size: int, log: StepLog) -> Device:
    """The device with efficiencies and overheads that fit the measured steps best.

    Minimises the mean |log(predicted / measured)|, each step weighted by the time it took (the sum is what a run
    takes), by coordinate descent on a shrinking logarithmic grid: robust against steps that the machine disturbed, and
    never outside what is physical (no efficiency above 1).
    """
    if len(log) < 20:
        raise ValueError(f"calibration needs at least 20 measured steps, the log has {len(log)}")
    memory, flops = device.attention_efficiencies
    best = msgspec.structs.replace(
        device,
        kv_efficiency=memory,
        attention_flops_efficiency=flops,
        token_overhead_s=max(device.token_overhead_s, 1e-6),
        row_overhead_s=max(device.row_overhead_s, 1e-6),
    )
    error = _error(shape, best, tensor_parallel_size, log)
    for spread in (8.0, 4.0, 2.0, 1.5, 1.2, 1.1, 1.05, 1.02, 1.01):
        before = math.inf
        while error < before * (1 - 1e-6):
            before = error
            for name in _FITTED:
                for factor in (1 / spread, spread):
                    value = getattr(best, name) * factor
                    if name.endswith("efficiency"):
                        value = min(value, 1.0)
                    trial = msgspec.structs.replace(best, **{name: value})
                    if (trial_error := _error(shape, trial, tensor_parallel_size, log)) < error:
                        best, error = trial, trial_error
    off = np.abs(predicted(shape, best, tensor_parallel_size, log) / np.asarray(log.seconds) - 1)
    source = f"{device.source}; calibrated on {len(log)} measured steps, median deviation {np.median(off):.1%}"
    return msgspec.structs.replace(best, source=source)


def predicted(shape: ModelShape, device: Device, tensor_parallel_size: int, log: StepLog) -> NDArray[np.float64]:
    """The model's seconds for each step of a log."""
    return StepTime(shape, device, tensor_parallel_size).all_seconds(log)


def _error(shape: ModelShape, device: Device, tensor_parallel_size: int, log: StepLog) -> float:
    real = np.asarray(log.seconds)
    off = np.abs(np.log(predicted(shape, device, tensor_parallel_size, log) / real))
    kv, pairs = device.attention_efficiencies
    apart = abs(math.log(kv / device.memory_efficiency)) + abs(math.log(pairs / device.flops_efficiency))
    return float(np.average(off, weights=real)) + DOUBT * apart


def find_device(name: str) -> Device:
    """By its name (the known ones are in DEVICES), or from the file that a calibration wrote."""
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=Device)
    except OSError as error:
        known = ", ".join(sorted(DEVICES))
        raise ValueError(f"gpu {name!r}: known are {known}, or a calibrated device's file: {error}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"gpu {name!r}: not a calibrated device: {error}") from error
