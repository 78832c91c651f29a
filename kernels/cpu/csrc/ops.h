// The operations as other C files call them; their meaning stands where they are defined.
#pragma once

#include <stdint.h>

void orca_rms_norm(int dtype, const void *x, int64_t x_stride, const void *residual, int64_t residual_stride,
                   const float *weight, void *out, void *sum, int64_t rows, int64_t hidden, float eps);
void orca_gate_mul(int dtype, int gelu, const void *gate, int64_t gate_stride, const void *up, int64_t up_stride,
                   void *out, int64_t rows, int64_t width);
void orca_rope_kv_write(int dtype, const void *q, int64_t q_stride, const void *k, int64_t k_stride, const void *v,
                        int64_t v_stride, const float *cos_sin, const int64_t *positions, const int64_t *slots,
                        void *q_out, void *k_cache, void *v_cache, int64_t rows, int num_heads, int num_kv_heads,
                        int head_dim, int64_t block_size);
void orca_paged_attention(int dtype, const void *q, int64_t q_stride, void *out, const void *k_cache,
                          const void *v_cache, const int32_t *query_start, const int32_t *context_lens,
                          const int32_t *block_tables, int64_t table_stride, int64_t num_requests, int num_heads,
                          int num_kv_heads, int head_dim, int64_t block_size, float scale, int window, float softcap);
void orca_linear(int weight_dtype, int out_dtype, const void *x, int64_t x_stride, const void *weight, const void *bias,
                 void *out, int64_t out_stride, int64_t rows, int64_t in_features, int64_t out_features);

typedef struct Group Group;  // of shared_memory.c
int orca_shm_all_reduce(Group *group, void *data, int64_t count, int kind);
