"""The Triton code of paged attention: prefill tiles, split-KV decode, and the merge of the splits.

Prefill is FlashAttention (Dao, 2022, 2023): a tile of queries walks over the tiles of its context with an online
softmax. Decode is Flash-Decoding with the work cut evenly (Stream-K; Osama et al., 2023): the key tiles of all short
requests form one line, `num_workers` programs take equal lengths of it wherever requests begin and end, and whoever
gets a part of a (request, KV head) leaves a partial result that `merge_kernel` combines by its log-sum-exp. So the
grid depends on no length, which lets a CUDA graph hold it, and one long request still fills the chip.

A tile's rows are tokens times the query heads of one KV head: row m is token m // GROUP, head m % GROUP. Scores are in
units of log2, since exp2 is what the hardware has.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
PRECISION = tl.constexpr("tf32x3")  # for float32 inputs: three products on the tensor cores, near float32's precision


@triton.jit
def _attend(
    q,
    query_at,
    total,
    top,
    acc,
    keys,
    values,
    block_table,
    first_key,
    last_key,
    context_len,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Takes the keys [first_key, last_key), a multiple of BLOCK_N apart from the end, into (total, top, acc).

    MASKED: some of these keys may be past the context, in a query's future or outside its window.
    """
    column = tl.arange(0, HEAD_PAD)
    lane = tl.arange(0, BLOCK_N)
    key_at = first_key + lane
    next_block = tl.load(block_table + key_at // BLOCK_SIZE, mask=key_at < context_len, other=0)
    for start in tl.range(first_key, last_key, BLOCK_N, num_stages=STAGES):
        key_at = start + lane
        exists = key_at < context_len
        # The block ids are read one tile ahead: a load that waits for a load would halve the depth of the pipeline.
        row = next_block.to(tl.int64) * BLOCK_STRIDE + (key_at % BLOCK_SIZE) * HEAD_DIM
        next_at = key_at + BLOCK_N
        next_block = tl.load(block_table + next_at // BLOCK_SIZE, mask=next_at < context_len, other=0)
        if HEAD_DIM == HEAD_PAD:
            k = tl.load(keys + row[None, :] + column[:, None])
        else:
            k = tl.load(keys + row[None, :] + column[:, None], mask=column[:, None] < HEAD_DIM, other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION)
        if SOFTCAP:
            scores = (2.0 * tl.sigmoid(scores * (2.0 * scale / softcap)) - 1.0) * (softcap * LOG2_E)
        else:
            scores = scores * (scale * LOG2_E)
        if MASKED:
            seen = exists[None, :] & (key_at[None, :] <= query_at[:, None])
            if WINDOW > 0:
                seen = seen & (key_at[None, :] > query_at[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        if MASKED:  # a row that has seen no key yet: its top is -inf
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        else:
            base = new_top
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        v_places = values + row[:, None] + column[None, :]
        # What lies past the context was never written and may be NaN: 0 * NaN would spoil the sum.
        if HEAD_DIM == HEAD_PAD:
            if MASKED:
                v = tl.load(v_places, mask=exists[:, None], other=0.0)
            else:
                v = tl.load(v_places)
        else:
            if MASKED:
                v = tl.load(v_places, mask=exists[:, None] & (column[None, :] < HEAD_DIM), other=0.0)
            else:
                v = tl.load(v_places, mask=column[None, :] < HEAD_DIM, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    return total, top, acc


@triton.jit
def _short_tiles(
    query_start,
    context_lens,
    num_requests,
    SHORT_QUERY: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REQUESTS_PAD: tl.constexpr,
):
    """For every request: how many key tiles one KV head of it has to read, 0 for those that the prefill part does."""
    index = tl.arange(0, REQUESTS_PAD)
    real = index < num_requests
    begin = tl.load(query_start + index, mask=real, other=0)
    query_len = tl.load(query_start + index + 1, mask=real, other=0) - begin
    context_len = tl.load(context_lens + index, mask=real, other=0)
    tiles = tl.cdiv(context_len, BLOCK_N)
    if WINDOW > 0:
        tiles -= tl.maximum(context_len - query_len - WINDOW + 1, 0) // BLOCK_N
    return tl.where((query_len > 0) & (query_len <= SHORT_QUERY), tiles, 0)


@triton.jit
def _units_per_worker(num_units, num_workers, MIN_UNITS: tl.constexpr):
    return tl.maximum(tl.cdiv(num_units, num_workers), MIN_UNITS)


@triton.jit
def _load_queries(
    q, q_stride, first_token, num_tokens, head, BLOCK_M: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr
):  # fmt: skip
    """The tile of queries of one KV head, and which of its rows are real."""
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, HEAD_PAD)
    token = row // GROUP
    real = token < num_tokens
    place = (first_token + token).to(tl.int64) * q_stride + (head * GROUP + row % GROUP) * HEAD_DIM
    mask = real[:, None]
    if HEAD_DIM != HEAD_PAD:
        mask = mask & (column[None, :] < HEAD_DIM)
    return tl.load(q + place[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(
    out, values, first_token, num_tokens, head, num_kv_heads, BLOCK_M: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr
):  # fmt: skip
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, HEAD_PAD)
    token = row // GROUP
    place = ((first_token + token).to(tl.int64) * num_kv_heads + head) * (GROUP * HEAD_DIM) + row % GROUP * HEAD_DIM
    mask = (token < num_tokens)[:, None] & (column[None, :] < HEAD_DIM)
    tl.store(out + place[:, None] + column[None, :], values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _decode_part(
    worker, num_workers, q, q_stride, kv_cache, v_offset, query_start, context_lens, block_tables, max_blocks,
    num_requests, scale, softcap, out, partial_acc, partial_top, partial_total, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SHORT_M: tl.constexpr, BLOCK_N: tl.constexpr,
    REQUESTS_PAD: tl.constexpr, MIN_UNITS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """One worker's share of the line of key tiles of the short requests."""
    SHORT_QUERY: tl.constexpr = SHORT_M // GROUP
    BLOCK_STRIDE: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    index = tl.arange(0, REQUESTS_PAD)
    tiles = _short_tiles(query_start, context_lens, num_requests, SHORT_QUERY, WINDOW, BLOCK_N, REQUESTS_PAD)
    ends = tl.cumsum(tiles, 0) * NUM_KV_HEADS
    num_units = tl.sum(tiles, 0) * NUM_KV_HEADS
    share = _units_per_worker(num_units, num_workers, MIN_UNITS)
    begin = worker * share
    unit = begin
    end = tl.minimum(begin + share, num_units)
    while unit < end:
        request = tl.sum((ends <= unit).to(tl.int32), 0)
        request_tiles = tl.sum(tl.where(index == request, tiles, 0), 0)
        request_unit = tl.sum(tl.where(index < request, tiles, 0), 0) * NUM_KV_HEADS
        head = (unit - request_unit) // request_tiles
        segment = request_unit + head * request_tiles  # where this (request, KV head) begins
        first_tile = unit - segment
        last_tile = tl.minimum(end - segment, request_tiles)

        first_token = tl.load(query_start + request)
        query_len = tl.load(query_start + request + 1) - first_token
        context_len = tl.load(context_lens + request)
        skipped = tl.cdiv(context_len, BLOCK_N) - request_tiles  # tiles before the window
        row = tl.arange(0, SHORT_M)
        query_at = context_len - query_len + row // GROUP
        queries = _load_queries(q, q_stride, first_token, query_len, head, SHORT_M, GROUP, HEAD_DIM, HEAD_PAD)
        keys = kv_cache + head * (BLOCK_SIZE * HEAD_DIM)
        total, top, acc = _attend(
            queries, query_at, tl.zeros([SHORT_M], tl.float32), tl.full([SHORT_M], float("-inf"), tl.float32),
            tl.zeros([SHORT_M, HEAD_PAD], tl.float32), keys, keys + v_offset,
            block_tables + request.to(tl.int64) * max_blocks, (skipped + first_tile) * BLOCK_N,
            (skipped + last_tile) * BLOCK_N, context_len, scale, softcap, WINDOW, SOFTCAP, True, BLOCK_N, BLOCK_SIZE,
            BLOCK_STRIDE, HEAD_DIM, HEAD_PAD, STAGES
        )  # fmt: skip
        if (first_tile == 0) & (last_tile == request_tiles):
            normal = acc / tl.where(total > 0.0, total, 1.0)[:, None]
            _store_rows(out, normal, first_token, query_len, head, NUM_KV_HEADS, SHORT_M, GROUP, HEAD_DIM, HEAD_PAD)
        else:
            # A share holds at most two partial segments: one from its beginning on, one up to its end.
            part = worker * 2 + (unit != begin).to(tl.int32)
            column = tl.arange(0, HEAD_PAD)
            tl.store(partial_top + part * SHORT_M + row, top)
            tl.store(partial_total + part * SHORT_M + row, total)
            place = (part * SHORT_M + row) * HEAD_PAD
            tl.store(partial_acc + place[:, None] + column[None, :], acc, mask=(row // GROUP < query_len)[:, None])
        unit = segment + last_tile


@triton.jit
def _prefill_part(
    tile, head, q, q_stride, kv_cache, v_offset, query_start, context_lens, block_tables, max_blocks, num_requests,
    scale, softcap, out, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SHORT_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REQUESTS_PAD: tl.constexpr,
    STAGES: tl.constexpr
):  # fmt: skip
    """One tile of queries of one KV head against all of its context.

    The tiles of request r are numbered from query_start[r] // BLOCK_Q + r on: no two requests share a number, and the
    number of tiles is bounded by num_tokens // BLOCK_Q + num_requests without a look at the lengths.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    BLOCK_STRIDE: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    index = tl.arange(0, REQUESTS_PAD)
    starts = tl.load(query_start + index, mask=index < num_requests, other=0)
    first_tiles = tl.where(index < num_requests, starts // BLOCK_Q + index, 2147483647)
    request = tl.sum((first_tiles <= tile).to(tl.int32), 0) - 1
    request_start = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - request_start
    done = (tile - request_start // BLOCK_Q - request) * BLOCK_Q  # this request's tokens before this tile
    if (query_len > SHORT_M // GROUP) & (done < query_len):
        context_len = tl.load(context_lens + request)
        num_tokens = tl.minimum(query_len - done, BLOCK_Q)
        first_at = context_len - query_len + done
        query_at = first_at + tl.arange(0, BLOCK_M) // GROUP
        queries = _load_queries(q, q_stride, request_start + done, num_tokens, head, BLOCK_M, GROUP, HEAD_DIM, HEAD_PAD)
        keys = kv_cache + head * (BLOCK_SIZE * HEAD_DIM)
        values = keys + v_offset
        block_table = block_tables + request.to(tl.int64) * max_blocks

        last_key = tl.maximum(first_at + num_tokens, 0)
        total = tl.zeros([BLOCK_M], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
        first_key = 0
        # Keys that every query of the tile sees need no mask; with a window these lie between two masked edges.
        unmasked_end = tl.maximum(first_at + 1, 0) // BLOCK_N * BLOCK_N
        if WINDOW > 0:
            first_key = tl.maximum(first_at - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            unmasked_begin = tl.cdiv(tl.maximum(last_key - WINDOW, 0), BLOCK_N) * BLOCK_N
            unmasked_begin = tl.minimum(unmasked_begin, tl.cdiv(last_key, BLOCK_N) * BLOCK_N)
            unmasked_end = tl.maximum(unmasked_end, unmasked_begin)
            total, top, acc = _attend(
                queries, query_at, total, top, acc, keys, values, block_table, first_key, unmasked_begin, context_len,
                scale, softcap, WINDOW, SOFTCAP, True, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, HEAD_DIM, HEAD_PAD, STAGES
            )  # fmt: skip
            first_key = unmasked_begin
        total, top, acc = _attend(
            queries, query_at, total, top, acc, keys, values, block_table, first_key, unmasked_end, context_len,
            scale, softcap, WINDOW, SOFTCAP, False, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, HEAD_DIM, HEAD_PAD, STAGES
        )  # fmt: skip
        total, top, acc = _attend(
            queries, query_at, total, top, acc, keys, values, block_table, unmasked_end, last_key, context_len,
            scale, softcap, WINDOW, SOFTCAP, True, BLOCK_N, BLOCK_SIZE, BLOCK_STRIDE, HEAD_DIM, HEAD_PAD, STAGES
        )  # fmt: skip
        normal = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        _store_rows(
            out, normal, request_start + done, num_tokens, head, NUM_KV_HEADS, BLOCK_M, GROUP, HEAD_DIM, HEAD_PAD
        )  # fmt: skip


@triton.jit(do_not_specialize=["max_blocks", "num_requests", "num_workers", "num_prefill_tiles"])
def attention_kernel(
    q, q_stride, kv_cache, v_offset, query_start, context_lens, block_tables, max_blocks, num_requests, num_workers,
    num_prefill_tiles, scale, softcap, out, partial_acc, partial_top, partial_total, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PREFILL: tl.constexpr, SHORT_M: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, REQUESTS_PAD: tl.constexpr, MIN_UNITS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Grid: num_workers decode workers, then num_prefill_tiles x NUM_KV_HEADS prefill tiles, the last tiles first,
    since under the causal mask they are the longest."""
    program = tl.program_id(0)
    if program < num_workers:
        _decode_part(
            program, num_workers, q, q_stride, kv_cache, v_offset, query_start, context_lens, block_tables, max_blocks,
            num_requests, scale, softcap, out, partial_acc, partial_top, partial_total, NUM_KV_HEADS, GROUP, HEAD_DIM,
            HEAD_PAD, BLOCK_SIZE, WINDOW, SOFTCAP, SHORT_M, BLOCK_N, REQUESTS_PAD, MIN_UNITS, STAGES
        )  # fmt: skip
    elif PREFILL:
        place = program - num_workers
        _prefill_part(
            num_prefill_tiles - 1 - place // NUM_KV_HEADS, place % NUM_KV_HEADS, q, q_stride, kv_cache, v_offset,
            query_start, context_lens, block_tables, max_blocks, num_requests, scale, softcap, out, NUM_KV_HEADS,
            GROUP, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, WINDOW, SOFTCAP, SHORT_M, BLOCK_M, BLOCK_N, REQUESTS_PAD, STAGES
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_requests", "num_workers"])
def merge_kernel(
    query_start, context_lens, num_requests, num_workers, out, partial_acc, partial_top, partial_total,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    WINDOW: tl.constexpr, SHORT_M: tl.constexpr, BLOCK_N: tl.constexpr, REQUESTS_PAD: tl.constexpr,
    MIN_UNITS: tl.constexpr
):  # fmt: skip
    """Grid: (num_requests, NUM_KV_HEADS). Joins the parts of one (request, KV head), if there are several."""
    SHORT_QUERY: tl.constexpr = SHORT_M // GROUP
    request = tl.program_id(0)
    head = tl.program_id(1)
    first_token = tl.load(query_start + request)
    query_len = tl.load(query_start + request + 1) - first_token
    if (query_len == 0) | (query_len > SHORT_QUERY):
        return
    index = tl.arange(0, REQUESTS_PAD)
    tiles = _short_tiles(query_start, context_lens, num_requests, SHORT_QUERY, WINDOW, BLOCK_N, REQUESTS_PAD)
    share = _units_per_worker(tl.sum(tiles, 0) * NUM_KV_HEADS, num_workers, MIN_UNITS)
    request_tiles = tl.sum(tl.where(index == request, tiles, 0), 0)
    segment = tl.sum(tl.where(index < request, tiles, 0), 0) * NUM_KV_HEADS + head * request_tiles
    first_worker = segment // share
    last_worker = (segment + request_tiles - 1) // share
    if (first_worker == last_worker) & (request_tiles > 0):
        return  # one worker had all of it and has written the result

    row = tl.arange(0, SHORT_M)
    column = tl.arange(0, HEAD_PAD)
    real = row // GROUP < query_len
    total = tl.zeros([SHORT_M], tl.float32)
    top = tl.full([SHORT_M], float("-inf"), tl.float32)
    acc = tl.zeros([SHORT_M, HEAD_PAD], tl.float32)
    if request_tiles > 0:
        for worker in range(first_worker, last_worker + 1):
            part = worker * 2 + (segment > worker * share).to(tl.int32)
            part_top = tl.load(partial_top + part * SHORT_M + row)
            part_total = tl.load(partial_total + part * SHORT_M + row)
            place = (part * SHORT_M + row) * HEAD_PAD
            part_acc = tl.load(partial_acc + place[:, None] + column[None, :], mask=real[:, None], other=0.0)
            new_top = tl.maximum(top, part_top)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            shrink, part_shrink = tl.exp2(top - base), tl.exp2(part_top - base)
            total = total * shrink + part_total * part_shrink
            acc = acc * shrink[:, None] + part_acc * part_shrink[:, None]
            top = new_top
    normal = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    _store_rows(out, normal, first_token, query_len, head, NUM_KV_HEADS, SHORT_M, GROUP, HEAD_DIM, HEAD_PAD)
