// What this machine can do at best: how fast all threads together read memory, and multiply and add floats.
#include "pool.h"
#include "vec.h"

#define PIECE_BYTES 262144
#define PIECE_ROUNDS 100000
#define CHAINS 10  // enough independent sums to hide the latency of an addition

static volatile float sink;

static void read_job(const void *context, int64_t begin, int64_t end) {
    const char *bytes = context;
    vecf sums[4] = {{0}, {0}, {0}, {0}};
    for (const char *p = bytes + begin * PIECE_BYTES; p < bytes + end * PIECE_BYTES; p += 16 * LANES)
        for (int i = 0; i < 4; i++) sums[i] += load_f32((const float *)p + i * LANES);
    sink = vec_sum(sums[0] + sums[1] + sums[2] + sums[3]);
}

// Reads the whole pieces of 256 KiB among `bytes`.
void orca_read(const void *memory, int64_t bytes) {
    pool_run(bytes / PIECE_BYTES, 4, pool_threads(), read_job, memory);
}

static void multiply_add_job(const void *context, int64_t begin, int64_t end) {
    const float *factor = context;
    vecf sums[CHAINS], x = vec_set(*factor);
    for (int i = 0; i < CHAINS; i++) sums[i] = vec_set((float)i);
    for (int64_t round = 0; round < (end - begin) * PIECE_ROUNDS; round++) {
#pragma GCC unroll 10
        for (int i = 0; i < CHAINS; i++) sums[i] = vec_fma(sums[i], x, x);
    }
    for (int i = 1; i < CHAINS; i++) sums[0] += sums[i];
    sink = vec_sum(sums[0]);
}

// Does at least `count` multiply-adds and returns how many.
int64_t orca_multiply_adds(int64_t count) {
    const float factor = 0.5f;
    const int64_t per_piece = (int64_t)PIECE_ROUNDS * CHAINS * LANES, pieces = (count + per_piece - 1) / per_piece;
    pool_run(pieces, 1, pool_threads(), multiply_add_job, &factor);
    return pieces * per_piece;
}
