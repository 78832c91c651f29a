// Included once per element type T; see attention.c. With PAIRS an element is bf16, and keys stay in pairs until used.

// keys[step][TILE]: the tile's keys turned round, so that a vector holds one step of LANES keys. A step is one element
// of the head as float, or with PAIRS two elements as they are.
INLINE void NAME(turn_keys)(const struct tile *tile, int padded, uint32_t *keys) {
    const int per_step = PAIRS ? 2 : 1;
    for (int token = 0; token < tile->count; token += LANES)  // whatever is left behind the context is masked later
        for (int d = 0; d < padded; d += LANES * per_step) {
            uint32_t *to = keys + d / per_step * TILE + token;
#if PAIRS || IS_FLOAT
            transpose_rows(tile->rows + token, d * sizeof(T), to, TILE);
#else
            vecu square[LANES];
            for (int i = 0; i < LANES; i++) square[i] = (vecu)LOAD((const T *)tile->rows[token + i] + d);
            transpose(square);
            for (int i = 0; i < LANES; i++) *(vecu_mem *)(to + i * TILE) = (vecu_mem)square[i];
#endif
        }
}

INLINE void NAME(score)(const float *q, int padded, const uint32_t *keys, float *scores, int rows) {
    vecf s[ROWS][TILE_VECS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < TILE_VECS; v++) s[r][v] = (vecf){0};
    const int per_step = PAIRS ? 2 : 1;
    for (int d = 0; d < padded; d += per_step, keys += TILE) {
#pragma GCC unroll 2
        for (int i = 0; i < per_step; i++) {
            KEEP_ORDER;  // else the compiler loads all of a step first, and runs out of registers
            vecf k[TILE_VECS];
            for (int v = 0; v < TILE_VECS; v++) {
                vecu raw = (vecu) * (const vecu_mem *)(keys + v * LANES);
                k[v] = !PAIRS ? (vecf)raw : i ? second_of_pair(raw) : first_of_pair(raw);
            }
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                vecf qs = vec_set(q[r * padded + d + i]);
                for (int v = 0; v < TILE_VECS; v++) s[r][v] = vec_fma(qs, k[v], s[r][v]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < TILE_VECS; v++) store_f32(scores + r * TILE + v * LANES, s[r][v]);
}

// acc[rows][columns of values from `column` on] = acc * correction + weights . values. With PAIRS 2 * LANES columns are
// kept as the even ones, then the odd ones. On the way the keys and values of the tile `ahead` are fetched.
INLINE void NAME(add_values)(const struct tile *tile, const struct tile *ahead, int count, int column, int padded,
                             const float *weights, const float *correction, float *acc, int rows, int vecs) {
    vecf a[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++)
            a[r][v] = load_f32(acc + r * padded + column + v * LANES) * vec_set(correction[r]);
    for (int token = 0; token < count; token++) {
        const T *row = (const T *)(tile->rows[token] + tile->values) + column;
        const char *next = ahead->rows[token] + column * sizeof(T);
        for (int line = 0; line < vecs * LANES * (int)sizeof(T); line += 64) {
            __builtin_prefetch(next + line, 0, 3);
            __builtin_prefetch(next + line + ahead->values, 0, 3);
        }
        vecf x[4];
        for (int v = 0; v < vecs; v++) {
#if PAIRS
            vecu pairs = (vecu) * (const vecu_mem *)(row + v / 2 * 2 * LANES);
            x[v] = v % 2 ? second_of_pair(pairs) : first_of_pair(pairs);
#else
            x[v] = LOAD(row + v * LANES);
#endif
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vecf w = vec_set(weights[r * TILE + token]);
            for (int v = 0; v < vecs; v++) a[r][v] = vec_fma(w, x[v], a[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) store_f32(acc + r * padded + column + v * LANES, a[r][v]);
}

#define ROWS_CASES(X) X(1) X(2) X(3) X(4) X(5) X(6)

static void NAME(score_rows)(const float *q, int padded, const uint32_t *keys, float *scores, int rows) {
    switch (rows) {
#define CASE(n)                                  \
    case n:                                      \
        NAME(score)(q, padded, keys, scores, n); \
        break;
        ROWS_CASES(CASE)
#undef CASE
    }
}

static void NAME(add_four)(const struct tile *tile, const struct tile *ahead, int count, int column, int padded,
                           const float *weights, const float *correction, float *acc, int rows) {
    switch (rows) {
#define CASE(n)                                                                               \
    case n:                                                                                   \
        NAME(add_values)(tile, ahead, count, column, padded, weights, correction, acc, n, 4); \
        break;
        ROWS_CASES(CASE)
#undef CASE
    }
}

static void NAME(add_two)(const struct tile *tile, const struct tile *ahead, int count, int column, int padded,
                          const float *weights, const float *correction, float *acc, int rows) {
    switch (rows) {
#define CASE(n)                                                                               \
    case n:                                                                                   \
        NAME(add_values)(tile, ahead, count, column, padded, weights, correction, acc, n, 2); \
        break;
        ROWS_CASES(CASE)
#undef CASE
    }
}

INLINE void NAME(find_tile)(const struct attention *c, const struct item *item, int64_t begin, int64_t last,
                            struct tile *tile) {
    const int32_t *table = c->block_tables + item->request * c->table_stride;
    const int64_t row_bytes = c->head_dim * (int64_t)sizeof(T), head_bytes = c->block_size * row_bytes;
    tile->values = c->v_cache - c->k_cache;
    tile->count = last - begin < TILE ? (int)(last - begin) : TILE;
    int64_t block = begin / c->block_size, offset = begin % c->block_size;
    for (int i = 0; i < tile->count; block++, offset = 0) {
        const char *row =
            c->k_cache + (table[block] * (int64_t)c->num_kv_heads + item->kv_head) * head_bytes + offset * row_bytes;
        const int end = tile->count - i < c->block_size - offset ? tile->count : i + (int)(c->block_size - offset);
        for (; i < end; i++, row += row_bytes) tile->rows[i] = row;
    }
    for (int i = tile->count; i < TILE; i++) tile->rows[i] = tile->rows[tile->count - 1];
}

// Rows that do not fill their last vector: copied, with zeros behind.
static void NAME(pad_tile)(const struct attention *c, struct tile *tile, char *padding) {
    const size_t row_bytes = (size_t)c->head_dim * sizeof(T), padded_bytes = (size_t)c->padded * sizeof(T);
    memset(padding, 0, 2 * TILE * padded_bytes);
    for (int i = 0; i < TILE; i++) {
        char *k = padding + i * padded_bytes;
        memcpy(k, tile->rows[i], row_bytes);
        memcpy(k + TILE * padded_bytes, tile->rows[i] + tile->values, row_bytes);
        tile->rows[i] = k;
    }
    tile->values = (ptrdiff_t)(TILE * padded_bytes);
}

static void NAME(attend)(const struct attention *c, const struct item *item, int64_t first, int64_t last,
                         struct state state, const float *q, char *work, const struct item *then) {
    const int padded = c->padded;
    const int64_t rows = (int64_t)item->num_queries * c->group;
    const int64_t num_queries = c->query_start[item->request + 1] - c->query_start[item->request];
    const int64_t position = c->context_lens[item->request] - num_queries + item->first_query;
    uint32_t *keys = (uint32_t *)work;
    float *scores = (float *)(work + (size_t)TILE * padded * 4);
    struct tile tiles[2];
    int64_t begin = first / TILE * TILE;
    NAME(find_tile)(c, item, begin, last, &tiles[0]);
    for (int turn = 0; begin < last; begin += TILE, turn ^= 1) {
        struct tile *tile = &tiles[turn], *ahead = &tiles[!turn];
        if (begin + TILE < last) {
            NAME(find_tile)(c, item, begin + TILE, last, ahead);
        } else {
            int64_t then_first = 0, then_last = 0;
            if (then) key_range(c, then, &then_first, &then_last);
            if (then_first < then_last)
                NAME(find_tile)(c, then, then_first / TILE * TILE, then_last, ahead);
            else
                ahead = tile;
        }
        announce(ahead);
        if (padded != c->head_dim) NAME(pad_tile)(c, tile, (char *)(scores + ROWS * TILE));
        NAME(turn_keys)(tile, padded, keys);
        for (int64_t r = 0; r < rows; r += ROWS) {
            const int n = rows - r < ROWS ? (int)(rows - r) : ROWS;
            const int64_t last_position = position + (r + n - 1) / c->group;
            if (last_position < begin) continue;
            float correction[ROWS];
            int low[ROWS], high[ROWS];
            NAME(score_rows)(q + r * padded, padded, keys, scores, n);
            for (int i = 0; i < n; i++) {
                const int64_t at = position + (r + i) / c->group - begin;
                low[i] = c->window > 0 && at >= c->window ? (int)(at + 1 - c->window) : 0;
                high[i] = at + 1 < TILE ? (int)(at + 1) : TILE;
            }
            weigh(c, scores, n, low, high, state.top + r, state.sum + r, correction);
            const int count = last_position + 1 - begin < tile->count ? (int)(last_position + 1 - begin) : tile->count;
            float *acc = state.acc + r * padded;
            int column = 0;
            for (; column + 4 * LANES <= padded; column += 4 * LANES)
                NAME(add_four)(tile, ahead, count, column, padded, scores, correction, acc, n);
            for (; column < padded; column += 2 * LANES)
                NAME(add_two)(tile, ahead, count, column, padded, scores, correction, acc, n);
            ahead = tile;  // fetched by now
        }
    }
}

// The queries of the item, a row per (token, head of the group), widened and padded with zeros.
static void NAME(load_queries)(const struct attention *c, const struct item *item, float *q) {
    const int64_t token = c->query_start[item->request] + item->first_query;
    for (int i = 0; i < item->num_queries; i++) {
        const T *from = (const T *)c->q + (token + i) * c->q_stride + item->kv_head * c->group * c->head_dim;
        for (int head = 0; head < c->group; head++, from += c->head_dim, q += c->padded) {
            int d = 0;
            for (; d + LANES <= c->head_dim; d += LANES) store_f32(q + d, LOAD(from + d));
            for (; d < c->padded; d += LANES) {
                T rest[LANES] = {0};
                if (d < c->head_dim) memcpy(rest, from + d, (size_t)(c->head_dim - d) * sizeof(T));
                store_f32(q + d, LOAD(rest));
            }
        }
    }
}

static void NAME(store_rows)(const struct attention *c, const struct item *item, struct state state) {
    const int64_t rows = (int64_t)item->num_queries * c->group;
    const int64_t token = c->query_start[item->request] + item->first_query;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t head = (int64_t)item->kv_head * c->group + r % c->group;
        T *out = (T *)c->out + ((token + r / c->group) * c->num_heads + head) * c->head_dim;
        const float scale = state.sum[r] > 0 ? 1.0f / state.sum[r] : 0.0f;
        const float *acc = state.acc + r * c->padded;
        for (int d = 0; d < c->head_dim; d += 2 * LANES) {
            const vecf first = load_f32(acc + d) * vec_set(scale), second = load_f32(acc + d + LANES) * vec_set(scale);
            float row[2 * LANES];
            T rounded[2 * LANES];
            if (PAIRS) {
                interleave(first, second, row);
            } else {
                store_f32(row, first);
                store_f32(row + LANES, second);
            }
            const int whole = d + 2 * LANES <= c->head_dim;
            T *to = whole ? out + d : rounded;
            STORE(to, load_f32(row));
            STORE(to + LANES, load_f32(row + LANES));
            if (!whole) memcpy(out + d, rounded, (size_t)(c->head_dim - d) * sizeof(T));
        }
    }
}

#undef T
#undef LOAD
#undef STORE
#undef NAME
#undef PAIRS
#undef IS_FLOAT
