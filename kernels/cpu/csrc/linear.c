// x [rows, in] times a packed weight [out, in], plus a bias.
//
// The weight lies in panels of PANEL output features; a panel runs through the input features in order, PANEL wide,
// bf16 in pairs of input features. A panel is one linear stream of memory, and so is the whole weight: one row of x is
// bound by memory reads alone. Bf16 is widened in registers (one instruction for LANES weights, shared by all rows of a
// tile) and multiplied as float32: on Sapphire Rapids a core does two float32 vector multiply-adds a cycle but one bf16
// dot instruction in two cycles, so this is twice as fast (measured: 99 against 48 G multiply-adds/s and core).
//
// Every output is one chain of additions over the input features in order, whatever the other rows and the number of
// threads, so a row's result does not depend on its batch.
#include <stdlib.h>

#include "ops.h"
#include "pool.h"
#include "scratch.h"
#include "vec.h"

#define PANEL_VECS 2
#define PANEL (PANEL_VECS * LANES)
#define MAX_TILE_ROWS (VEC512 ? 12 : 5)  // rows * PANEL_VECS accumulators stay in registers
#define PREFETCH_BYTES 4096              // ahead in the stream of the weight
#define ARRANGE_ALONE 32768              // elements that one thread arranges sooner than a second one wakes

struct linear {
    const float *x;      // arranged by arrange_job
    const char *weight;  // packed
    const void *bias;    // of the weight's type, or null
    char *out;
    int64_t out_stride;  // bytes
    int64_t rows, passes, in_features, in_steps, out_features;
    int weight_dtype, out_dtype;
};

// Adds the bias and rounds. Out of line, so that the many tile functions below stay small and quick to compile.
static __attribute__((noinline)) void store_tile(const struct linear *c, int64_t row, int64_t column, const float *sums,
                                                 int tile_rows) {
    float bias[PANEL] = {0};
    const int64_t left = c->out_features - column;
    const int width = left < PANEL ? (int)left : PANEL;
    if (c->bias)
        for (int i = 0; i < width; i++)
            bias[i] = c->weight_dtype == FLOAT32 ? ((const float *)c->bias)[column + i]
                                                 : get_bf16((const bf16 *)c->bias + column + i);
    for (int r = 0; r < tile_rows; r++, sums += PANEL) {
        char *out = c->out + (row + r) * c->out_stride + column * (c->out_dtype == FLOAT32 ? 4 : 2);
        int i = 0;
        for (; i + LANES <= width; i += LANES) {
            vecf sum = load_f32(sums + i) + load_f32(bias + i);
            if (c->out_dtype == FLOAT32)
                store_f32((float *)out + i, sum);
            else
                store_bf16((bf16 *)out + i, sum);
        }
        for (; i < width; i++) {
            if (c->out_dtype == FLOAT32)
                put_f32((float *)out + i, sums[i] + bias[i]);
            else
                put_bf16((bf16 *)out + i, sums[i] + bias[i]);
        }
    }
}

// Rows are taken in `passes` of nearly equal length.
INLINE int64_t first_row(const struct linear *c, int64_t pass) {
    return c->rows * pass / c->passes;
}

// One step is one input feature (float32) or a pair of them (bf16): PANEL_VECS vectors of the weight.
INLINE void tile(const struct linear *c, int64_t row, int64_t column, const char *weight, const char *ahead,
                 int64_t ahead_step, int is_bf16, int tile_rows, int ahead_lines) {
    vecf sums[MAX_TILE_ROWS][PANEL_VECS];
    for (int r = 0; r < tile_rows; r++)
        for (int v = 0; v < PANEL_VECS; v++) sums[r][v] = (vecf){0};
    const int features = is_bf16 ? 2 : 1;
    const float *x = c->x + row * c->in_steps * features;
    for (int64_t step = 0; step < c->in_steps; step++) {
        for (int line = 0; line < ahead_lines; line++) __builtin_prefetch(ahead + 64 * line, 0, 2);
        ahead += ahead_step;
        vecu packed[PANEL_VECS];
        for (int v = 0; v < PANEL_VECS; v++) packed[v] = (vecu)((const vecu_mem *)weight)[v];
        weight += PANEL * 4;
#pragma GCC unroll 2
        for (int feature = 0; feature < features; feature++) {
            vecf w[PANEL_VECS];
            for (int v = 0; v < PANEL_VECS; v++)
                w[v] = !is_bf16 ? (vecf)packed[v] : feature ? second_of_pair(packed[v]) : first_of_pair(packed[v]);
#pragma GCC unroll 14
            for (int r = 0; r < tile_rows; r++) {
                vecf xs = vec_set(x[feature * tile_rows + r]);
                for (int v = 0; v < PANEL_VECS; v++) sums[r][v] = vec_fma(xs, w[v], sums[r][v]);
            }
        }
        x += features * tile_rows;
    }
    float results[MAX_TILE_ROWS * PANEL];
    for (int r = 0; r < tile_rows; r++)
        for (int v = 0; v < PANEL_VECS; v++) store_f32(results + r * PANEL + v * LANES, sums[r][v]);
    store_tile(c, row, column, results, tile_rows);
}

typedef void (*tile_fn)(const struct linear *, int64_t, int64_t, const char *, const char *, int64_t);

// The first passes over a panel fetch the next panel: one pass two lines a step, else two passes one line each.
#define TILE(type, is_bf16, rows)                                                                                \
    static void tile_##type##_##rows##_alone(const struct linear *c, int64_t row, int64_t column, const char *w, \
                                             const char *ahead, int64_t step) {                                  \
        tile(c, row, column, w, ahead, step, is_bf16, rows, 2);                                                  \
    }                                                                                                            \
    static void tile_##type##_##rows(const struct linear *c, int64_t row, int64_t column, const char *w,         \
                                     const char *ahead, int64_t step) {                                          \
        tile(c, row, column, w, ahead, step, is_bf16, rows, 1);                                                  \
    }
#if VEC512
#define FOR_TILE_ROWS(X, ...)                                                                                   \
    X(__VA_ARGS__, 1)                                                                                           \
    X(__VA_ARGS__, 2) X(__VA_ARGS__, 3) X(__VA_ARGS__, 4) X(__VA_ARGS__, 5) X(__VA_ARGS__, 6) X(__VA_ARGS__, 7) \
        X(__VA_ARGS__, 8) X(__VA_ARGS__, 9) X(__VA_ARGS__, 10) X(__VA_ARGS__, 11) X(__VA_ARGS__, 12)
#else
#define FOR_TILE_ROWS(X, ...) X(__VA_ARGS__, 1) X(__VA_ARGS__, 2) X(__VA_ARGS__, 3) X(__VA_ARGS__, 4) X(__VA_ARGS__, 5)
#endif
FOR_TILE_ROWS(TILE, f32, 0)
FOR_TILE_ROWS(TILE, bf16, 1)
#define ENTRY(type, rows) {tile_##type##_##rows, tile_##type##_##rows##_alone},
static const tile_fn tiles[2][MAX_TILE_ROWS][2] = {{FOR_TILE_ROWS(ENTRY, f32)}, {FOR_TILE_ROWS(ENTRY, bf16)}};

static void linear_job(const void *context, int64_t begin, int64_t end) {
    const struct linear *c = context;
    const int64_t panel_bytes = c->in_steps * PANEL * 4;
    for (int64_t panel = begin; panel < end; panel++) {
        const char *weight = c->weight + panel * panel_bytes;
        for (int64_t pass = 0; pass < c->passes; pass++) {
            const int64_t row = first_row(c, pass), rows = first_row(c, pass + 1) - row;
            const tile_fn run = tiles[c->weight_dtype == BFLOAT16][rows - 1][c->passes == 1];
            if (c->passes == 1)
                run(c, row, panel * PANEL, weight, weight + PREFETCH_BYTES, PANEL * 4);
            else if (pass < 2)
                run(c, row, panel * PANEL, weight, weight + panel_bytes + 64 * pass, PANEL * 4);
            else
                run(c, row, panel * PANEL, weight, weight, 0);
        }
    }
}

struct arrange {
    const struct linear *linear;
    const char *x;
    float *to;
    int64_t x_stride;  // elements
};

INLINE vecf load_x(const struct arrange *c, int64_t row, int64_t i) {
    return c->linear->weight_dtype == FLOAT32 ? load_f32((const float *)c->x + row * c->x_stride + i)
                                              : load_bf16((const bf16 *)c->x + row * c->x_stride + i);
}

INLINE float get_x(const struct arrange *c, int64_t row, int64_t i) {
    return c->linear->weight_dtype == FLOAT32 ? ((const float *)c->x)[row * c->x_stride + i]
                                              : get_bf16((const bf16 *)c->x + row * c->x_stride + i);
}

// Widens x to float and turns each pass round: its rows lie side by side, feature after feature, as the tiles read
// them.
static void arrange_job(const void *context, int64_t begin, int64_t end) {
    const struct arrange *c = context;
    const int64_t features = c->linear->in_features;
    const int64_t padded = c->linear->in_steps * (c->linear->weight_dtype == BFLOAT16 ? 2 : 1);
    for (int64_t pass = begin; pass < end; pass++) {
        const int64_t row = first_row(c->linear, pass), rows = first_row(c->linear, pass + 1) - row;
        float *to = c->to + row * padded;
        int64_t i = 0;
        // The last square is left to the loop below: a store writes LANES floats, of which the next one overwrites all
        // but `rows`.
        for (; i + 2 * LANES <= features; i += LANES) {
            if (rows == 1) {
                store_f32(to + i, load_x(c, row, i));
                continue;
            }
            vecu square[LANES];
            for (int r = 0; r < LANES; r++) square[r] = r < rows ? (vecu)load_x(c, row + r, i) : (vecu){0};
            transpose(square);
            for (int j = 0; j < LANES; j++) store_f32(to + (i + j) * rows, (vecf)square[j]);
        }
        for (; i < features; i++)
            for (int64_t r = 0; r < rows; r++) to[i * rows + r] = get_x(c, row + r, i);
        for (; i < padded; i++)
            for (int64_t r = 0; r < rows; r++) to[i * rows + r] = 0.0f;
    }
}

// Strides are in elements. `x` is of the weight's type.
void orca_linear(int weight_dtype, int out_dtype, const void *x, int64_t x_stride, const void *weight, const void *bias,
                 void *out, int64_t out_stride, int64_t rows, int64_t in_features, int64_t out_features) {
    if (rows <= 0) return;
    struct linear c = {
        .weight = weight,
        .bias = bias,
        .out = out,
        .out_stride = out_stride * (out_dtype == FLOAT32 ? 4 : 2),
        .rows = rows,
        .passes = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS,
        .in_features = in_features,
        .in_steps = weight_dtype == BFLOAT16 ? (in_features + 1) / 2 : in_features,
        .out_features = out_features,
        .weight_dtype = weight_dtype,
        .out_dtype = out_dtype,
    };
    float *arranged = scratch_of(SCRATCH_LINEAR, (size_t)(rows * 2 * ((in_features + 1) / 2)) * sizeof(float));
    struct arrange arrange = {&c, x, arranged, x_stride};
    pool_run(c.passes, 1, rows * in_features > ARRANGE_ALONE ? pool_threads() : 1, arrange_job, &arrange);
    c.x = arranged;
    pool_run((out_features + PANEL - 1) / PANEL, 1, pool_threads(), linear_job, &c);
}

struct pack {
    const char *weight;
    char *packed;
    int64_t stride, in_features, out_features;
    int is_bf16;
};

// One element at a time, for what does not fill a square of LANES output features and LANES steps.
static void pack_rest(const struct pack *c, int64_t feature, int64_t first_step, int64_t steps, char *to) {
    const int size = c->is_bf16 ? 2 : 4, per_step = c->is_bf16 ? 2 : 1;
    for (int64_t i = first_step * per_step; i < steps * per_step; i++) {
        char *place = to + i / per_step * PANEL * 4 + i % per_step * size;
        if (feature < c->out_features && i < c->in_features)
            memcpy(place, c->weight + (feature * c->stride + i) * size, (size_t)size);
        else
            memset(place, 0, (size_t)size);
    }
}

static void pack_job(const void *context, int64_t begin, int64_t end) {
    const struct pack *c = context;
    const int64_t row_bytes = c->stride * (c->is_bf16 ? 2 : 4),
                  whole_steps = c->is_bf16 ? c->in_features / 2 : c->in_features;
    const int64_t steps = c->is_bf16 ? (c->in_features + 1) / 2 : c->in_features;
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t column = 0; column < PANEL; column += LANES) {
            const int64_t feature = panel * PANEL + column;
            char *to = c->packed + (panel * steps * PANEL + column) * 4;
            int64_t step = 0;
            if (feature + LANES <= c->out_features) {
                const char *rows[LANES];
                for (int i = 0; i < LANES; i++) rows[i] = c->weight + (feature + i) * row_bytes;
                for (; step + LANES <= whole_steps; step += LANES)
                    transpose_rows(rows, 4 * step, (uint32_t *)(to + step * PANEL * 4), PANEL);
            }
            for (int i = 0; i < LANES; i++) pack_rest(c, feature + i, step, steps, to + 4 * i);
        }
}

int64_t orca_packed_bytes(int weight_dtype, int64_t in_features, int64_t out_features) {
    int64_t steps = weight_dtype == BFLOAT16 ? (in_features + 1) / 2 : in_features;
    return (out_features + PANEL - 1) / PANEL * steps * PANEL * 4;
}

void orca_pack(int weight_dtype, const void *weight, int64_t stride, void *packed, int64_t in_features,
               int64_t out_features) {
    struct pack c = {weight, packed, stride, in_features, out_features, weight_dtype == BFLOAT16};
    pool_run((out_features + PANEL - 1) / PANEL, 1, pool_threads(), pack_job, &c);
}
