// Included once per element type T; see rows.c.

// Sums of squares go to four accumulators, folded in one order, so that a row's result depends on the row alone.
static void NAME(norm)(const void *context, int64_t begin, int64_t end) {
    const struct norm *c = context;
    const int64_t hidden = c->hidden;
    const float *weight = c->weight;
    for (int64_t row = begin; row < end; row++) {
        const T *x = (const T *)c->x + row * c->x_stride;
        T *out = (T *)c->out + row * hidden;
        if (c->residual) {
            const T *residual = (const T *)c->residual + row * c->residual_stride;
            T *sum = (T *)c->sum + row * hidden;
            int64_t i = 0;
            for (; i + LANES <= hidden; i += LANES) STORE(sum + i, LOAD(x + i) + LOAD(residual + i));
            for (; i < hidden; i++) PUT(sum + i, GET(x + i) + GET(residual + i));
            x = sum;
        }
        vecf squares[4] = {{0}, {0}, {0}, {0}};
        int64_t i = 0;
        for (; i + 4 * LANES <= hidden; i += 4 * LANES)
            for (int j = 0; j < 4; j++) {
                vecf v = LOAD(x + i + j * LANES);
                squares[j] = vec_fma(v, v, squares[j]);
            }
        for (; i + LANES <= hidden; i += LANES) {
            vecf v = LOAD(x + i);
            squares[0] = vec_fma(v, v, squares[0]);
        }
        float total = vec_sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
        for (; i < hidden; i++) total += GET(x + i) * GET(x + i);
        float scale = 1.0f / sqrtf(total / (float)hidden + c->eps);
        for (i = 0; i + LANES <= hidden; i += LANES) STORE(out + i, LOAD(x + i) * vec_set(scale) * load_f32(weight + i));
        for (; i < hidden; i++) PUT(out + i, GET(x + i) * scale * weight[i]);
    }
}

INLINE vecf NAME(silu_of)(vecf x) {
    return x / (vec_set(1.0f) + vec_exp(-x));
}

INLINE vecf NAME(gelu_of)(vecf x) {  // the tanh approximation
    vecf inner = vec_set(0.79788456f) * vec_fma(x * x * x, vec_set(0.044715f), x);
    return vec_set(0.5f) * x * (vec_set(1.0f) + vec_tanh(inner));
}

#define GATE_JOB(job, activation)                                                                                \
    static void job(const void *context, int64_t begin, int64_t end) {                                           \
        const struct gate *c = context;                                                                          \
        for (int64_t row = begin; row < end; row++) {                                                            \
            const T *gate = (const T *)c->gate + row * c->gate_stride;                                           \
            const T *up = (const T *)c->up + row * c->up_stride;                                                 \
            T *out = (T *)c->out + row * c->width;                                                               \
            int64_t i = 0;                                                                                       \
            for (; i + LANES <= c->width; i += LANES) STORE(out + i, activation(LOAD(gate + i)) * LOAD(up + i)); \
            for (; i < c->width; i++) PUT(out + i, activation(vec_set(GET(gate + i)))[0] * GET(up + i));         \
        }                                                                                                        \
    }
GATE_JOB(NAME(silu), NAME(silu_of))
GATE_JOB(NAME(gelu), NAME(gelu_of))
#undef GATE_JOB

// out[i] = x[i] cos - x[i + half] sin; out[i + half] = x[i + half] cos + x[i] sin.
INLINE void NAME(rotate)(const T *x, const float *cos_sin, T *out, int head_dim) {
    const int half = head_dim / 2;
    const float *cosine = cos_sin, *sine = cos_sin + half;
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        vecf first = LOAD(x + i), second = LOAD(x + half + i), c = load_f32(cosine + i), s = load_f32(sine + i);
        STORE(out + i, vec_fma(first, c, -(second * s)));
        STORE(out + half + i, vec_fma(second, c, first * s));
    }
    for (; i < half; i++) {
        float first = GET(x + i), second = GET(x + half + i), c = cosine[i], s = sine[i];
        PUT(out + i, first * c - second * s);
        PUT(out + half + i, second * c + first * s);
    }
}

static void NAME(write)(const void *context, int64_t begin, int64_t end) {
    const struct rope *c = context;
    const int64_t head_dim = c->head_dim, block_elements = c->num_kv_heads * c->block_size * head_dim;
    for (int64_t row = begin; row < end; row++) {
        const int64_t slot = c->slots[row];
        if (slot < 0) continue;
        const int64_t at = slot / c->block_size * block_elements + slot % c->block_size * head_dim;
        const T *k = (const T *)c->k + row * c->k_stride, *v = (const T *)c->v + row * c->v_stride;
        for (int head = 0; head < c->num_kv_heads; head++) {
            const int64_t place = at + head * c->block_size * head_dim;
            memcpy((T *)c->k_cache + place, k + head * head_dim, (size_t)head_dim * sizeof(T));
            memcpy((T *)c->v_cache + place, v + head * head_dim, (size_t)head_dim * sizeof(T));
        }
    }
}

static void NAME(rope)(const void *context, int64_t begin, int64_t end) {
    const struct rope *c = context;
    const int64_t head_dim = c->head_dim, block_elements = c->num_kv_heads * c->block_size * head_dim;
    for (int64_t row = begin; row < end; row++) {
        const float *cos_sin = c->cos_sin + c->positions[row] * head_dim;
        const T *q = (const T *)c->q + row * c->q_stride;
        T *q_out = (T *)c->q_out + row * c->num_heads * head_dim;
        for (int head = 0; head < c->num_heads; head++)
            NAME(rotate)(q + head * head_dim, cos_sin, q_out + head * head_dim, c->head_dim);
        const int64_t slot = c->slots[row];
        if (slot < 0) continue;
        const int64_t at = slot / c->block_size * block_elements + slot % c->block_size * head_dim;
        const T *k = (const T *)c->k + row * c->k_stride, *v = (const T *)c->v + row * c->v_stride;
        for (int head = 0; head < c->num_kv_heads; head++) {
            const int64_t place = at + head * c->block_size * head_dim;
            NAME(rotate)(k + head * head_dim, cos_sin, (T *)c->k_cache + place, c->head_dim);
            memcpy((T *)c->v_cache + place, v + head * head_dim, (size_t)head_dim * sizeof(T));
        }
    }
}

#undef T
#undef LOAD
#undef STORE
#undef GET
#undef PUT
#undef NAME
