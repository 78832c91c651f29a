// Operations on rows of numbers: norms, gates, rotary embedding with the KV write, block copies.
#include <math.h>

#include "ops.h"
#include "pool.h"
#include "vec.h"

#define MIN_BYTES_PER_THREAD 16384  // waking a second thread pays from about a microsecond of work on

static int threads_for(int64_t bytes) {
    int64_t wanted = bytes / MIN_BYTES_PER_THREAD;
    int threads = pool_threads();
    return wanted < threads ? (int)wanted : threads;
}

static int64_t grain_for(int64_t count, int64_t bytes) {
    int64_t grain = count * MIN_BYTES_PER_THREAD / (bytes + 1);
    return grain > 1 ? grain : 1;
}

struct norm {
    const void *x, *residual;
    const float *weight;
    void *out, *sum;
    int64_t x_stride, residual_stride, hidden;
    float eps;
};

struct gate {
    const void *gate, *up;
    void *out;
    int64_t gate_stride, up_stride, width;
};

struct rope {
    const void *q, *k, *v;
    void *q_out, *k_cache, *v_cache;
    const float *cos_sin;
    const int64_t *positions, *slots;
    int64_t q_stride, k_stride, v_stride, block_size;
    int num_heads, num_kv_heads, head_dim;
};

#define T float
#define LOAD load_f32
#define STORE store_f32
#define GET get_f32
#define PUT put_f32
#define NAME(x) x##_f32
#include "rows.inc.h"

#define T bf16
#define LOAD load_bf16
#define STORE store_bf16
#define GET get_bf16
#define PUT put_bf16
#define NAME(x) x##_bf16
#include "rows.inc.h"

#define T fp16
#define LOAD load_fp16
#define STORE store_fp16
#define GET get_fp16
#define PUT put_fp16
#define NAME(x) x##_fp16
#include "rows.inc.h"

static const int64_t element_bytes[] = {4, 2, 2};
static const job_fn norm_jobs[] = {norm_f32, norm_bf16, norm_fp16};
static const job_fn silu_jobs[] = {silu_f32, silu_bf16, silu_fp16};
static const job_fn gelu_jobs[] = {gelu_f32, gelu_bf16, gelu_fp16};
static const job_fn rope_jobs[] = {rope_f32, rope_bf16, rope_fp16};
static const job_fn write_jobs[] = {write_f32, write_bf16, write_fp16};

static void run_rows(int64_t rows, int64_t bytes_per_row, job_fn job, const void *context) {
    int64_t bytes = rows * bytes_per_row;
    pool_run(rows, grain_for(rows, bytes), threads_for(bytes), job, context);
}

// Strides are in elements. `residual` and `sum` are null without a residual.
void orca_rms_norm(int dtype, const void *x, int64_t x_stride, const void *residual, int64_t residual_stride,
                   const float *weight, void *out, void *sum, int64_t rows, int64_t hidden, float eps) {
    struct norm context = {x, residual, weight, out, sum, x_stride, residual_stride, hidden, eps};
    run_rows(rows, hidden * element_bytes[dtype] * (residual ? 4 : 2), norm_jobs[dtype], &context);
}

void orca_gate_mul(int dtype, int gelu, const void *gate, int64_t gate_stride, const void *up, int64_t up_stride,
                   void *out, int64_t rows, int64_t width) {
    struct gate context = {gate, up, out, gate_stride, up_stride, width};
    run_rows(rows, width * element_bytes[dtype] * 3, gelu ? gelu_jobs[dtype] : silu_jobs[dtype], &context);
}

void orca_rope_kv_write(int dtype, const void *q, int64_t q_stride, const void *k, int64_t k_stride, const void *v,
                        int64_t v_stride, const float *cos_sin, const int64_t *positions, const int64_t *slots,
                        void *q_out, void *k_cache, void *v_cache, int64_t rows, int num_heads, int num_kv_heads,
                        int head_dim, int64_t block_size) {
    struct rope context = {q,     k,        v,        q_out,    k_cache,    v_cache,   cos_sin,      positions,
                           slots, q_stride, k_stride, v_stride, block_size, num_heads, num_kv_heads, head_dim};
    run_rows(rows, 2 * (num_heads + 2 * num_kv_heads) * head_dim * element_bytes[dtype], rope_jobs[dtype], &context);
}

void orca_kv_write(int dtype, const void *k, int64_t k_stride, const void *v, int64_t v_stride, const int64_t *slots,
                   void *k_cache, void *v_cache, int64_t rows, int num_kv_heads, int head_dim, int64_t block_size) {
    struct rope context = {.k = k,
                           .v = v,
                           .k_cache = k_cache,
                           .v_cache = v_cache,
                           .slots = slots,
                           .k_stride = k_stride,
                           .v_stride = v_stride,
                           .block_size = block_size,
                           .num_kv_heads = num_kv_heads,
                           .head_dim = head_dim};
    run_rows(rows, 4 * num_kv_heads * head_dim * element_bytes[dtype], write_jobs[dtype], &context);
}

struct copies {
    char *pool;
    const int64_t *pairs;
    int64_t half_bytes, block_bytes;
};

static void copy_job(const void *context, int64_t begin, int64_t end) {
    const struct copies *c = context;
    for (int64_t i = begin; i < end; i++)
        for (int half = 0; half < 2; half++) {
            char *base = c->pool + half * c->half_bytes;
            memcpy(base + c->pairs[2 * i + 1] * c->block_bytes, base + c->pairs[2 * i] * c->block_bytes,
                   (size_t)c->block_bytes);
        }
}

// The pool [2, num_blocks, block_bytes]: K and V of one layer.
void orca_copy_blocks(void *kv_pool, int64_t half_bytes, int64_t block_bytes, const int64_t *pairs, int64_t count) {
    struct copies context = {kv_pool, pairs, half_bytes, block_bytes};
    run_rows(count, 4 * block_bytes, copy_job, &context);
}
