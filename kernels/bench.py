"""`python -m orcaserve.kernels.bench [OP] [--device cpu|cuda]`: the kernels beside torch's, and beside the machine.

Every figure of a run is taken in that run: times, those of the baselines, and the ceilings (what all threads read from
memory, and multiply and add, at best). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from orcaserve.kernels import cpu
from orcaserve.kernels.batch import AttentionBatch
from orcaserve.kernels.cpu.library import library
from orcaserve.kernels.cpu.memory import huge_pages
from orcaserve.kernels.decoder_layers import DecoderLayer, DecoderShape, NativeDecoder, decoder_layers_reference
from orcaserve.kernels.linear import PackedWeight, linear, pack
from orcaserve.kernels.paged_attention import gather_context, paged_attention
from orcaserve.kernels.rms_norm import rms_norm, rms_norm_reference
from orcaserve.kernels.rope import cos_sin_table, rope_kv_write, rope_kv_write_reference
from orcaserve.kernels.silu_mul import silu_mul, silu_mul_reference

# SmolLM2-135M, the demo model.
NUM_LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 30, 576, 1536, 49152
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
QKV_WIDTH = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
LINEAR_SHAPES = ((HIDDEN, QKV_WIDTH), (HIDDEN, HIDDEN), (HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
DTYPE = torch.bfloat16
OPERATIONS = ("linear", "decode_attention", "prefill_attention", "rows", "layers")


@dataclass(frozen=True, slots=True)
class Ceiling:
    read_bytes_per_s: float
    multiply_adds_per_s: float

    def share(self, seconds: float, num_bytes: float, multiply_adds: float) -> float:
        """Of the least time that reading and arithmetic could take, whichever is longer."""
        return max(num_bytes / self.read_bytes_per_s, multiply_adds / self.multiply_adds_per_s) / seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m orcaserve.kernels.bench", description=__doc__)
    parser.add_argument("operation", nargs="?", metavar="OP", help=f"cpu: one of {', '.join(OPERATIONS)}; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="cpu: threads of both sides")
    parser.add_argument("--repeats", type=int, default=9, help="cpu: timed runs of each; the fastest counts")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda":
        from orcaserve.kernels import bench_gpu

        figures = bench_gpu.run([] if chosen.operation is None else [chosen.operation])
        print(json.dumps(figures))
        sys.exit(0 if figures["all_correct"] else 1)
    if chosen.operation not in (None, *OPERATIONS):
        parser.error(f"OP must be one of {', '.join(OPERATIONS)}, not {chosen.operation}")
    if not cpu.available():
        parser.error("the native CPU kernels could not be compiled here; there is nothing to measure")
    torch.set_num_threads(chosen.threads)
    cpu.set_num_threads(chosen.threads)
    print(json.dumps(measure(OPERATIONS if chosen.operation is None else (chosen.operation,), chosen.repeats)))


def measure(operations: Sequence[str], repeats: int) -> dict[str, Any]:
    torch.manual_seed(0)
    ceiling = measure_ceiling(repeats)
    print(
        f"ceiling: {ceiling.read_bytes_per_s / 1e9:.1f} GB/s, {ceiling.multiply_adds_per_s / 1e9:.0f} G multiply-adds/s"
    )
    result: dict[str, Any] = {
        "threads": cpu.num_threads(),
        "torch": torch.__version__,
        "read_gb_per_s": round(ceiling.read_bytes_per_s / 1e9, 2),
        "multiply_adds_g_per_s": round(ceiling.multiply_adds_per_s / 1e9, 1),
    }
    benchmarks: dict[str, Callable[[Ceiling, int], dict[str, Any]]] = {
        "linear": bench_linear,
        "decode_attention": bench_decode_attention,
        "prefill_attention": bench_prefill_attention,
        "rows": bench_rows,
        "layers": bench_layers,
    }
    for operation in operations:
        result |= benchmarks[operation](ceiling, repeats)
    return result


def fastest(run: Callable[[], object], repeats: int, budget_s: float = 4.0) -> float:
    """Seconds of the fastest of up to `repeats` runs, after one to warm up; fewer if they would pass the budget."""
    times = []
    started = time.perf_counter()
    run()
    for _ in range(repeats):
        before = time.perf_counter()
        run()
        now = time.perf_counter()
        times.append(now - before)
        if now - started > budget_s and len(times) >= 2:
            break
    return min(times)


def measure_ceiling(repeats: int) -> Ceiling:
    memory = huge_pages(256 << 20).fill_(1)  # larger than the caches that a core has to itself
    read_s = fastest(lambda: library().orca_read(memory.data_ptr(), memory.numel()), repeats)
    wanted = 1_000_000_000
    done = library().orca_multiply_adds(wanted)
    return Ceiling(memory.numel() / read_s, done / fastest(lambda: library().orca_multiply_adds(wanted), repeats))


def report(name: str, seconds: float, share: float | None, baselines: dict[str, float]) -> None:
    rivals = ", ".join(
        f"{other} {time_s * 1e3:.3f} ms (x{time_s / seconds:.2f})" for other, time_s in baselines.items()
    )
    reached = "" if share is None else f"{share:6.1%} of the ceiling"
    print(f"{name:<28}{seconds * 1e3:10.3f} ms {reached:<22} {rivals}", flush=True)


def bench_linear(ceiling: Ceiling, repeats: int) -> dict[str, Any]:
    """All linears of the model, each with weights of its own, so that they come from memory as in a step."""
    weights = [torch.randn(out, inner).to(DTYPE) for _ in range(NUM_LAYERS) for inner, out in LINEAR_SHAPES]
    weights.append(torch.randn(VOCABULARY, HIDDEN).to(DTYPE))
    packed = [pack(weight) for weight in weights]
    num_weights = sum(weight.numel() for weight in weights)
    speedups: dict[str, dict[str, float]] = {}
    for rows in ROWS:
        inputs = {inner: torch.randn(rows, inner).to(DTYPE) for inner, _ in LINEAR_SHAPES}
        ours = fastest(partial(_run_packed, packed, inputs), repeats)
        eager = fastest(partial(_run_eager, weights, inputs), min(repeats, 3))
        prepacked = _time_prepacked(weights, inputs, rows, min(repeats, 5))
        share = ceiling.share(ours, 2 * num_weights, rows * num_weights)
        report(f"linears, {rows} rows", ours, share, {"torch eager": eager, "oneDNN prepacked": prepacked})
        speedups[str(rows)] = {
            "ms": round(ours * 1e3, 3),
            "share_of_ceiling": round(share, 3),
            "over_torch_eager": round(eager / ours, 2),
            "over_onednn_prepacked": round(prepacked / ours, 2),
        }
    return {"linear_speedups": speedups}


def _run_packed(weights: Sequence[PackedWeight], inputs: dict[int, Tensor]) -> None:
    for weight in weights:
        linear(inputs[weight.in_features], weight)


def _run_eager(weights: Sequence[Tensor], inputs: dict[int, Tensor]) -> None:
    for weight in weights:
        functional.linear(inputs[weight.shape[1]], weight)


def _time_prepacked(weights: Sequence[Tensor], inputs: dict[int, Tensor], rows: int, repeats: int) -> float:
    """What torch.compile with frozen weights calls."""
    mkldnn = torch.ops.mkldnn
    reordered = [(inputs[w.shape[1]], mkldnn._reorder_linear_weight(w, rows)) for w in weights]

    def run() -> None:
        for x, weight in reordered:
            mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    return fastest(run, repeats)


def bench_decode_attention(ceiling: Ceiling, repeats: int) -> dict[str, Any]:
    """16 requests with 256 tokens of context each, one query token, every layer with a pool of its own."""
    num_requests, context_len = 16, 256
    cases = [attention_case([1] * num_requests, [context_len] * num_requests) for _ in range(NUM_LAYERS)]
    ours = fastest(lambda: [paged_attention(*case, HEAD_DIM**-0.5) for case in cases], repeats)
    repeated = fastest(lambda: [gather_and_sdpa(*case, repeat_heads=True) for case in cases], min(repeats, 5))
    grouped = fastest(lambda: [gather_and_sdpa(*case, repeat_heads=False) for case in cases], min(repeats, 5))
    batched = fastest(lambda: [batched_gather_and_sdpa(*case) for case in cases], min(repeats, 5))
    tokens = num_requests * context_len * NUM_LAYERS
    share = ceiling.share(
        ours, tokens * NUM_KV_HEADS * HEAD_DIM * 2 * DTYPE.itemsize, tokens * NUM_HEADS * HEAD_DIM * 2
    )
    baselines = {"gather + SDPA": repeated, "the same, enable_gqa": grouped, "gather and SDPA of all at once": batched}
    report("decode attention, 16 x 256", ours, share, baselines)
    return {
        "decode_attention_ms": round(ours * 1e3, 3),
        "decode_attention_share_of_ceiling": round(share, 3),
        "decode_attention_speedup": round(repeated / ours, 2),
        "decode_attention_speedup_over_gqa": round(grouped / ours, 2),
        "decode_attention_speedup_over_batched_gqa": round(batched / ours, 2),
    }


def bench_prefill_attention(ceiling: Ceiling, repeats: int) -> dict[str, Any]:
    """One prompt of 512 tokens."""
    length = 512
    cases = [attention_case([length], [length]) for _ in range(NUM_LAYERS)]
    ours = fastest(lambda: [paged_attention(*case, HEAD_DIM**-0.5) for case in cases], repeats)
    repeated = fastest(lambda: [gather_and_sdpa(*case, repeat_heads=True) for case in cases], min(repeats, 5))
    grouped = fastest(lambda: [gather_and_sdpa(*case, repeat_heads=False) for case in cases], min(repeats, 5))
    multiply_adds = length * (length + 1) / 2 * NUM_HEADS * HEAD_DIM * 2 * NUM_LAYERS
    share = ceiling.share(ours, length * NUM_KV_HEADS * HEAD_DIM * 2 * DTYPE.itemsize * NUM_LAYERS, multiply_adds)
    report("prefill attention, 512", ours, share, {"gather + SDPA": repeated, "the same, enable_gqa": grouped})
    return {
        "prefill_attention_ms": round(ours * 1e3, 3),
        "prefill_attention_share_of_ceiling": round(share, 3),
        "prefill_attention_speedup": round(repeated / ours, 2),
        "prefill_attention_speedup_over_gqa": round(grouped / ours, 2),
    }


def attention_case(query_lens: Sequence[int], context_lens: Sequence[int]) -> tuple[Tensor, Tensor, AttentionBatch]:
    """Random queries over a pool whose blocks lie in random order."""
    num_blocks = [-(-length // BLOCK_SIZE) for length in context_lens]
    places = torch.randperm(sum(num_blocks)).int().split(num_blocks)
    tables = torch.zeros(len(context_lens), max(num_blocks), dtype=torch.int32)
    slots, positions = [], []
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        tables[row, : num_blocks[row]] = places[row]
        at = torch.arange(context_len - query_len, context_len)
        positions.append(at)
        slots.append(tables[row][at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE)
    batch = AttentionBatch(
        torch.tensor([0, *query_lens]).cumsum(0).int(),
        torch.tensor(context_lens, dtype=torch.int32),
        tables,
        torch.cat(slots),
        torch.cat(positions),
        max(query_lens),
        max(context_lens),
    )
    pool = torch.randn(2, sum(num_blocks), NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(DTYPE)
    return torch.randn(sum(query_lens), NUM_HEADS, HEAD_DIM).to(DTYPE), pool, batch


def gather_and_sdpa(q: Tensor, pool: Tensor, batch: AttentionBatch, *, repeat_heads: bool) -> list[Tensor]:
    """Request by request. Queries are either one token or the whole context, so a mask is never needed."""
    starts, outputs = batch.query_start.tolist(), []
    for request, context_len in enumerate(batch.context_lens.tolist()):
        k, v = gather_context(pool, batch.block_tables[request], context_len)
        if repeat_heads:
            k, v = k.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 0), v.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 0)
        queries = q[starts[request] : starts[request + 1]].transpose(0, 1)
        outputs.append(
            functional.scaled_dot_product_attention(
                queries[None], k[None], v[None], is_causal=queries.shape[1] > 1, enable_gqa=not repeat_heads
            )
        )
    return outputs


def batched_gather_and_sdpa(q: Tensor, pool: Tensor, batch: AttentionBatch) -> Tensor:
    """Decodes of equal context, all at once: what a batch without differing lengths would allow."""
    num_requests = batch.num_requests
    pages = pool[:, batch.block_tables.long()].permute(0, 1, 3, 2, 4, 5)
    k, v = pages.reshape(2, num_requests, NUM_KV_HEADS, -1, HEAD_DIM)
    return functional.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)


def bench_rows(_ceiling: Ceiling, repeats: int) -> dict[str, Any]:
    """The operations on rows of numbers at 64 tokens, a hundred times, against their torch references."""
    rows, times = 64, 100
    x, residual = torch.randn(2, rows, HIDDEN).to(DTYPE)
    weight = torch.randn(HIDDEN)
    gate, up = torch.randn(rows, 2 * INTERMEDIATE).to(DTYPE).chunk(2, 1)
    _, pool, batch = attention_case([1] * rows, [64] * rows)
    qkv = torch.randn(rows, QKV_WIDTH // HEAD_DIM, HEAD_DIM).to(DTYPE)
    q, k, v = qkv.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), 1)
    table = cos_sin_table(HEAD_DIM, 64, {"rope_theta": 1e5}, 64)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "rms_norm": (
            lambda: rms_norm(x, weight, 1e-5, residual),
            lambda: rms_norm_reference(x, weight, 1e-5, residual),
        ),
        "silu_mul": (lambda: silu_mul(gate, up), lambda: silu_mul_reference(gate, up)),
        "rope_kv_write": (
            lambda: rope_kv_write(q, k, v, table, pool, batch),
            lambda: rope_kv_write_reference(q, k, v, table, pool, batch),
        ),
    }
    result = {}
    for name, (native, reference) in pairs.items():
        ours = fastest(partial(_repeat, native, times), repeats) / times
        theirs = fastest(partial(_repeat, reference, times), min(repeats, 3)) / times
        report(f"{name}, {rows} rows", ours, None, {"torch reference": theirs})  # all of it lies in the caches
        result[f"{name}_speedup"] = round(theirs / ours, 2)
    return result


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def bench_layers(ceiling: Ceiling, repeats: int) -> dict[str, Any]:
    """A decode step of the model without embedding and sampling: layers in one call, layers call by call, the head."""
    layers, head = _layers()
    shape = DecoderShape(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, 1e-5, "silu")
    weight_bytes = DTYPE.itemsize * sum(inner * out for inner, out in LINEAR_SHAPES) * NUM_LAYERS
    steps: dict[str, dict[str, float]] = {}
    for rows in (1, 4, 16, 64):
        _, pool, batch = attention_case([1] * rows, [256] * rows)
        pools = [pool.clone() for _ in layers]
        x = torch.randn(rows, HIDDEN).to(DTYPE)
        native = NativeDecoder(layers, shape, pools)
        ours = fastest(partial(native, x, batch), repeats)
        single = fastest(partial(decoder_layers_reference, layers, shape, pools, x, batch), repeats)
        head_s = fastest(partial(linear, x, head, None, torch.float32), repeats)
        num_weights = weight_bytes / DTYPE.itemsize
        share = ceiling.share(ours, weight_bytes + NUM_LAYERS * pool.nbytes, rows * num_weights)
        report(f"layers, {rows} decodes", ours, share, {"call by call": single})
        steps[str(rows)] = {
            "layers_ms": round(ours * 1e3, 3),
            "head_ms": round(head_s * 1e3, 3),
            "share_of_ceiling": round(share, 3),
            "over_call_by_call": round(single / ours, 2),
        }
    return {"decode_steps": steps}


def _layers() -> tuple[list[DecoderLayer], PackedWeight]:
    def weight(inner: int, out: int) -> PackedWeight:
        return pack((torch.randn(out, inner) * inner**-0.5).to(DTYPE))

    table, norm = cos_sin_table(HEAD_DIM, 512, {"rope_theta": 1e5}, 512), torch.ones(HIDDEN)
    layers = []
    for _ in range(NUM_LAYERS):
        qkv, output, gate_up, down = (weight(inner, out) for inner, out in LINEAR_SHAPES)
        layers.append(DecoderLayer(norm, qkv, output, norm, gate_up, down, table, HEAD_DIM**-0.5))
    return layers, weight(HIDDEN, VOCABULARY)


if __name__ == "__main__":
    main()
