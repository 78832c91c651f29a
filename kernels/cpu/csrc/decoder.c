// All layers of a decoder in one call: the operations one after the other, without a return to the caller in between.
//
// A decode step of a small model is some 300 operations of a few microseconds each, and as many calls from Python cost
// as much again. The arithmetic is that of the single operations, to the bit.
#include <string.h>

#include "ops.h"
#include "pool.h"
#include "scratch.h"

// Weights of one layer. A null pointer: the layer has no such norm or bias.
struct decoder_layer {
    const float *input_norm, *q_norm, *k_norm, *after_attention_norm, *mlp_norm, *after_mlp_norm;
    const void *qkv, *qkv_bias, *output, *output_bias, *gate_up, *gate_up_bias, *down, *down_bias;  // packed
    const float *cos_sin;
    void *k_cache, *v_cache;
    float scale, softcap;
    int32_t window;
};

struct decoder {
    const struct decoder_layer *layers;
    Group *group;  // null: this rank is alone
    int64_t num_layers, hidden, intermediate, block_size;
    int32_t dtype, num_heads, num_kv_heads, head_dim, gelu;
    float eps;
};

struct decoder_batch {
    const int32_t *query_start, *context_lens, *block_tables;
    const int64_t *slot_mapping, *positions;
    int64_t table_stride, num_requests, num_tokens;
};

struct head_norm {
    const struct decoder *decoder;
    const struct decoder_layer *layer;
    char *qkv;
    int64_t token_bytes, q_bytes;
};

static void head_norm_job(const void *context, int64_t begin, int64_t end) {
    const struct head_norm *c = context;
    const struct decoder *d = c->decoder;
    for (int64_t token = begin; token < end; token++) {
        char *q = c->qkv + token * c->token_bytes, *k = q + c->q_bytes;
        orca_rms_norm(d->dtype, q, d->head_dim, NULL, 0, c->layer->q_norm, q, NULL, d->num_heads, d->head_dim, d->eps);
        orca_rms_norm(d->dtype, k, d->head_dim, NULL, 0, c->layer->k_norm, k, NULL, d->num_kv_heads, d->head_dim,
                      d->eps);
    }
}

static int reduce(const struct decoder *d, void *x, int64_t rows) {
    return d->group ? orca_shm_all_reduce(d->group, x, rows * d->hidden, d->dtype) : 0;
}

static void norm_in_place(const struct decoder *d, const float *weight, void *x, int64_t rows) {
    if (weight) orca_rms_norm(d->dtype, x, d->hidden, NULL, 0, weight, x, NULL, rows, d->hidden, d->eps);
}

// x [num_tokens, hidden] goes in as the embeddings and comes out as what is still to be added to `residual`. Returns 0,
// or the error of an all-reduce.
int orca_decoder_layers(const struct decoder *d, const struct decoder_batch *batch, void *x, void *residual) {
    const int64_t rows = batch->num_tokens, size = d->dtype == 0 ? 4 : 2, hidden = d->hidden;
    const int64_t q_width = (int64_t)d->num_heads * d->head_dim, kv_width = (int64_t)d->num_kv_heads * d->head_dim;
    const int64_t qkv_width = q_width + 2 * kv_width;
    char *normed =
        scratch_of(SCRATCH_DECODER, (size_t)(rows * size * (hidden + qkv_width + 2 * q_width + 3 * d->intermediate)));
    char *qkv = normed + rows * size * hidden, *q = qkv + rows * size * qkv_width,
         *attended = q + rows * size * q_width;
    char *gate_up = attended + rows * size * q_width, *gated = gate_up + rows * size * 2 * d->intermediate;
    int error;
    for (int64_t i = 0; i < d->num_layers; i++) {
        const struct decoder_layer *layer = &d->layers[i];
        if (i == 0) {
            memcpy(residual, x, (size_t)(rows * hidden * size));
            orca_rms_norm(d->dtype, x, hidden, NULL, 0, layer->input_norm, normed, NULL, rows, hidden, d->eps);
        } else {
            orca_rms_norm(d->dtype, x, hidden, residual, hidden, layer->input_norm, normed, residual, rows, hidden,
                          d->eps);
        }
        orca_linear(d->dtype, d->dtype, normed, hidden, layer->qkv, layer->qkv_bias, qkv, qkv_width, rows, hidden,
                    qkv_width);
        if (layer->q_norm) {
            struct head_norm context = {d, layer, qkv, qkv_width * size, q_width * size};
            pool_run(rows, 8, rows > 8 ? pool_threads() : 1, head_norm_job, &context);
        }
        orca_rope_kv_write(d->dtype, qkv, qkv_width, qkv + q_width * size, qkv_width, qkv + (q_width + kv_width) * size,
                           qkv_width, layer->cos_sin, batch->positions, batch->slot_mapping, q, layer->k_cache,
                           layer->v_cache, rows, d->num_heads, d->num_kv_heads, d->head_dim, d->block_size);
        orca_paged_attention(d->dtype, q, q_width, attended, layer->k_cache, layer->v_cache, batch->query_start,
                             batch->context_lens, batch->block_tables, batch->table_stride, batch->num_requests,
                             d->num_heads, d->num_kv_heads, d->head_dim, d->block_size, layer->scale, layer->window,
                             layer->softcap);
        orca_linear(d->dtype, d->dtype, attended, q_width, layer->output, layer->output_bias, x, hidden, rows, q_width,
                    hidden);
        if ((error = reduce(d, x, rows))) return error;
        norm_in_place(d, layer->after_attention_norm, x, rows);
        orca_rms_norm(d->dtype, x, hidden, residual, hidden, layer->mlp_norm, normed, residual, rows, hidden, d->eps);
        orca_linear(d->dtype, d->dtype, normed, hidden, layer->gate_up, layer->gate_up_bias, gate_up,
                    2 * d->intermediate, rows, hidden, 2 * d->intermediate);
        orca_gate_mul(d->dtype, d->gelu, gate_up, 2 * d->intermediate, gate_up + d->intermediate * size,
                      2 * d->intermediate, gated, rows, d->intermediate);
        orca_linear(d->dtype, d->dtype, gated, d->intermediate, layer->down, layer->down_bias, x, hidden, rows,
                    d->intermediate, hidden);
        if ((error = reduce(d, x, rows))) return error;
        norm_in_place(d, layer->after_mlp_norm, x, rows);
    }
    return 0;
}
