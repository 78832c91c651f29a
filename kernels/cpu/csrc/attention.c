// Attention over the flat batch of a step, reading keys and values where they lie in the KV blocks.
//
// The arithmetic of one query row is fixed by its position alone, so that it is the same to the bit as a decode, within
// a chunk of any length, and beside any other rows: keys are taken in tiles of TILE tokens at absolute positions, with
// an online softmax in float32 (Milakov and Gimelshein, 2018) within a segment of SEGMENT tokens; segments are merged
// in order by their log-sum-exp (Flash-Decoding). Long contexts of few rows are shared out by segment.
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "ops.h"
#include "pool.h"
#include "scratch.h"
#include "vec.h"

#define TILE 64  // keys scored at a time
#define TILE_VECS (TILE / LANES)
#define SEGMENT 256     // keys of one online softmax
#define ROWS 6          // query rows in registers
#define BLOCK_ROWS 48   // query rows of one item: about as many as share a tile of keys in the first-level cache
#define SPLIT_ROWS 24   // items of at most so many rows are shared out by segment
#define EMPTY (-1e30f)  // the maximum over no keys; finite, so that differences are never NaN

struct attention {
    const char *q;
    char *out;
    const char *k_cache, *v_cache;
    const int32_t *query_start, *context_lens, *block_tables;
    int64_t q_stride, table_stride, block_size;
    int64_t num_requests;
    int num_heads, num_kv_heads, head_dim, window;
    float scale, softcap;
    int size;    // bytes of an element
    int group;   // query heads per KV head
    int padded;  // head_dim rounded up to 2 * LANES
    int block_queries;
    const struct item *items;
    int64_t num_items;
    float *partials;      // of the items that are split: see partial_floats
    atomic_int *arrived;  // per split row block
};

// A block of queries of one request and KV head; when split, one segment of its keys.
struct item {
    int32_t request, kv_head;
    int32_t first_query, num_queries;  // within the request
    // Of an item that is split (else num_segments is 0): its segment of the keys, and where the parts of this row
    // block leave their results.
    int32_t num_segments, segment;
    int32_t first_partial, part, counter;
};

// The state of the online softmax of a block of rows: accumulators [rows, padded], maxima and sums [rows].
struct state {
    float *acc, *top, *sum;
};

static int64_t state_floats(int64_t rows, int64_t padded) {
    return rows * (padded + 2) + 14;  // a multiple of 16 after rounding: states stay aligned
}

static struct state state_at(float *base, int64_t rows, int64_t padded) {
    return (struct state){base, base + rows * padded, base + rows * padded + rows};
}

static void clear(struct state s, int64_t rows, int64_t padded) {
    memset(s.acc, 0, (size_t)(rows * padded) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        s.top[r] = EMPTY;
        s.sum[r] = 0.0f;
    }
}

static __attribute__((noinline)) float exp_of(float x) {
    return vec_exp(vec_set(x))[0];
}

// into += from; one function for all, so that every path rounds alike.
static __attribute__((noinline)) void merge(struct state into, struct state from, int64_t rows, int64_t padded) {
    for (int64_t r = 0; r < rows; r++) {
        float top = into.top[r] > from.top[r] ? into.top[r] : from.top[r];
        float keep = exp_of(into.top[r] - top), take = exp_of(from.top[r] - top);
        into.top[r] = top;
        into.sum[r] = into.sum[r] * keep + from.sum[r] * take;
        float *a = into.acc + r * padded, *b = from.acc + r * padded;
        for (int64_t d = 0; d < padded; d += LANES)
            store_f32(a + d, load_f32(a + d) * vec_set(keep) + load_f32(b + d) * vec_set(take));
    }
}

// Where the keys of a tile lie; the values lie `values` bytes behind them.
struct tile {
    int count;  // keys of the context within the tile; the pointers behind repeat the last one
    ptrdiff_t values;
    const char *rows[TILE];
};

// Touches the first lines of each run of rows, so that the hardware sees where a stream begins and brings the rest into
// the second-level cache. A core alone has too few line buffers to fetch all lines one by one (measured: 12.2 ms by
// lines alone, 9.9 ms with this, for 94 MB of scattered blocks of 2 KiB).
static void announce(const struct tile *tile) {
    for (int row = 0; row < TILE; row += 16)
        for (int line = 0; line < 4; line++) {
            __builtin_prefetch(tile->rows[row] + 64 * line, 0, 2);
            __builtin_prefetch(tile->rows[row] + 64 * line + tile->values, 0, 2);
        }
}

// `rows` rows of scores become softmax weights, in place. Row i sees the keys [low[i], high[i]) of the tile. `top` and
// `sum` go on; what was accumulated before must be multiplied by `correction`.
static void weigh(const struct attention *c, float *scores, int rows, const int *low, const int *high, float *top,
                  float *sum, float *correction) {
    vecf change = {0};
    for (int r = 0; r < rows; r++) {
        float *row = scores + r * TILE;
        vecf s[TILE_VECS], most = vec_set(EMPTY);
        for (int v = 0; v < TILE_VECS; v++) {
            s[v] = load_f32(row + v * LANES) * vec_set(c->scale);
            if (c->softcap > 0) s[v] = vec_set(c->softcap) * vec_tanh(s[v] / vec_set(c->softcap));
        }
        if (low[r] > 0 || high[r] < TILE)
            for (int v = 0; v < TILE_VECS; v++) {
                veci at = vec_lanes() + v * LANES;
                s[v] = vec_select((at >= low[r]) & (at < high[r]), s[v], vec_set(-INFINITY));
            }
        for (int v = 0; v < TILE_VECS; v++) {
            most = vec_max(most, s[v]);
            store_f32(row + v * LANES, s[v]);
        }
        const float tile_top = vec_top(most), new_top = top[r] > tile_top ? top[r] : tile_top;
        change[r] = top[r] - new_top;
        top[r] = new_top;
    }
    float corrections[LANES];
    store_f32(corrections, vec_exp(change));
    for (int r = 0; r < rows; r++) {
        float *row = scores + r * TILE;
        vecf total = {0};
        for (int v = 0; v < TILE_VECS; v++) {
            vecf weight = vec_exp(load_f32(row + v * LANES) - vec_set(top[r]));
            total += weight;
            store_f32(row + v * LANES, weight);
        }
        correction[r] = corrections[r];
        sum[r] = sum[r] * corrections[r] + vec_sum(total);
    }
}

// The keys that the item looks at: those that some query of it may see, of its segment when it is split.
static void key_range(const struct attention *c, const struct item *item, int64_t *first, int64_t *last) {
    const int64_t num_queries = c->query_start[item->request + 1] - c->query_start[item->request];
    const int64_t position = c->context_lens[item->request] - num_queries + item->first_query;
    *last = position + item->num_queries;
    *first = c->window > 0 && position + 1 > c->window ? position + 1 - c->window : 0;
    if (item->num_segments) {
        const int64_t begin = (int64_t)item->segment * SEGMENT, end = begin + SEGMENT;
        *first = *first > begin ? *first : begin;
        *last = *last < end ? *last : end;
    }
}

// Runs the item's row block over the keys [first, last), and fetches those of `then`: see attention.inc.h.
typedef void (*attend_fn)(const struct attention *c, const struct item *item, int64_t first, int64_t last,
                          struct state state, const float *q, char *work, const struct item *then);

#define T float
#define LOAD load_f32
#define STORE store_f32
#define NAME(x) x##_f32
#define IS_FLOAT 1
#define PAIRS 0
#include "attention.inc.h"

#define T bf16
#define LOAD load_bf16
#define STORE store_bf16
#define NAME(x) x##_bf16
#define IS_FLOAT 0
#define PAIRS 1
#include "attention.inc.h"

#define T fp16
#define LOAD load_fp16
#define STORE store_fp16
#define NAME(x) x##_fp16
#define IS_FLOAT 0
#define PAIRS 0
#include "attention.inc.h"

struct plan {
    struct item *items;
    int64_t num_items, capacity;
    int64_t num_partials, num_counters;
};

static struct item *append(struct plan *plan) {
    if (plan->num_items == plan->capacity) {
        plan->capacity = plan->capacity ? 2 * plan->capacity : 256;
        plan->items = realloc(plan->items, (size_t)plan->capacity * sizeof(struct item));
        if (!plan->items) abort();
    }
    return &plan->items[plan->num_items++];
}

static void plan_items(const struct attention *c, struct plan *plan) {
    for (int64_t request = 0; request < c->num_requests; request++) {
        const int num_queries = c->query_start[request + 1] - c->query_start[request];
        // The last queries see most keys: they go first, so that no long item is left for the end.
        int end = num_queries;
        while (end > 0) {
            const int begin = (end - 1) / c->block_queries * c->block_queries;
            struct item item = {.request = (int32_t)request, .first_query = begin, .num_queries = end - begin};
            int64_t first, last;
            key_range(c, &item, &first, &last);
            const int64_t first_segment = first / SEGMENT, end_segment = (last + SEGMENT - 1) / SEGMENT;
            const int64_t num_segments = end_segment - first_segment;
            const int split = num_segments > 1 && num_queries * c->group <= SPLIT_ROWS;
            for (int head = 0; head < c->num_kv_heads; head++) {
                item.kv_head = head;
                if (!split) {
                    item.num_segments = 0;
                    *append(plan) = item;
                    continue;
                }
                item.num_segments = (int32_t)num_segments;
                item.first_partial = (int32_t)plan->num_partials;
                item.counter = (int32_t)plan->num_counters++;
                plan->num_partials += num_segments;
                for (int64_t s = 0; s < num_segments; s++) {
                    item.part = (int32_t)s;
                    item.segment = (int32_t)(first_segment + s);
                    *append(plan) = item;
                }
            }
            end = begin;
        }
    }
}

static void run_items(const struct attention *c, int64_t begin, int64_t end, int dtype) {
    static const attend_fn attend[] = {attend_f32, attend_bf16, attend_fp16};
    static void (*const load_queries[])(const struct attention *, const struct item *, float *) = {
        load_queries_f32, load_queries_bf16, load_queries_fp16};
    static void (*const store[])(const struct attention *, const struct item *, struct state) = {
        store_rows_f32, store_rows_bf16, store_rows_fp16};
    const int64_t most_rows = (int64_t)c->block_queries * c->group;
    const int64_t floats = (state_floats(most_rows, c->padded) + 15) / 16 * 16;
    const int64_t q_floats = most_rows * c->padded;
    const size_t work_bytes = (size_t)TILE * c->padded * 4 * 3 + (size_t)ROWS * TILE * 4 + 64;
    float *base = scratch_of(SCRATCH_ATTENTION, (size_t)(2 * floats + q_floats) * sizeof(float) + work_bytes);
    float *q = base + 2 * floats;
    char *work = (char *)(q + q_floats);
    for (int64_t i = begin; i < end; i++) {
        const struct item *item = &c->items[i], *then = i + 1 < c->num_items ? item + 1 : NULL;
        const int64_t rows = (int64_t)item->num_queries * c->group;
        struct state total = state_at(base, rows, c->padded), part = state_at(base + floats, rows, c->padded);
        int64_t first, last;
        key_range(c, item, &first, &last);
        load_queries[dtype](c, item, q);
        if (item->num_segments) {
            float *slots = c->partials + (int64_t)item->first_partial * floats;
            struct state mine = state_at(slots + item->part * floats, rows, c->padded);
            clear(mine, rows, c->padded);
            attend[dtype](c, item, first, last, mine, q, work, then);
            if (atomic_fetch_add(&c->arrived[item->counter], 1) + 1 < item->num_segments) continue;
            total = state_at(slots, rows, c->padded);
            for (int64_t s = 1; s < item->num_segments; s++)
                merge(total, state_at(slots + s * floats, rows, c->padded), rows, c->padded);
        } else {
            clear(total, rows, c->padded);
            for (int64_t key = first; key < last;) {
                const int64_t end_key = (key / SEGMENT + 1) * SEGMENT;
                const int only = key == first;
                struct state into = only ? total : part;
                if (!only) clear(part, rows, c->padded);
                attend[dtype](c, item, key, last < end_key ? last : end_key, into, q, work, then);
                if (!only) merge(total, part, rows, c->padded);
                key = end_key;
            }
        }
        store[dtype](c, item, total);
    }
}

#define RUN_JOB(name, dtype)                                            \
    static void name(const void *context, int64_t begin, int64_t end) { \
        run_items(context, begin, end, dtype);                          \
    }
RUN_JOB(run_f32, FLOAT32)
RUN_JOB(run_bf16, BFLOAT16)
RUN_JOB(run_fp16, FLOAT16)

// Strides are in elements. q's heads lie side by side in a row; out is contiguous.
void orca_paged_attention(int dtype, const void *q, int64_t q_stride, void *out, const void *k_cache,
                          const void *v_cache, const int32_t *query_start, const int32_t *context_lens,
                          const int32_t *block_tables, int64_t table_stride, int64_t num_requests, int num_heads,
                          int num_kv_heads, int head_dim, int64_t block_size, float scale, int window, float softcap) {
    static const job_fn jobs[] = {run_f32, run_bf16, run_fp16};
    static const int element_bytes[] = {4, 2, 2};
    const int group = num_heads / num_kv_heads;
    struct attention c = {
        .q = q,
        .out = out,
        .k_cache = k_cache,
        .v_cache = v_cache,
        .query_start = query_start,
        .context_lens = context_lens,
        .block_tables = block_tables,
        .q_stride = q_stride,
        .table_stride = table_stride,
        .block_size = block_size,
        .num_requests = num_requests,
        .num_heads = num_heads,
        .num_kv_heads = num_kv_heads,
        .head_dim = head_dim,
        .window = window,
        .scale = scale,
        .softcap = softcap,
        .size = element_bytes[dtype],
        .group = group,
        .padded = (head_dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES),
        .block_queries = group < BLOCK_ROWS ? BLOCK_ROWS / group : 1,
    };
    struct plan plan = {0};
    plan_items(&c, &plan);
    const int64_t floats = (state_floats((int64_t)c.block_queries * group, c.padded) + 15) / 16 * 16;
    c.items = plan.items;
    c.num_items = plan.num_items;
    if (plan.num_counters) {
        c.partials = malloc((size_t)(plan.num_partials * floats) * sizeof(float));
        c.arrived = calloc((size_t)plan.num_counters, sizeof(atomic_int));
        if (!c.partials || !c.arrived) abort();
    }
    pool_run(plan.num_items, 1, pool_threads(), jobs[dtype], &c);
    free(c.partials);
    free((void *)c.arrived);
    free(plan.items);
}
