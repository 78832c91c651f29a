// The next token of each row; what is computed is said in kernels/sampling.py. A row is one item of work and depends on
// nothing but itself. Greedy rows read their logits once; the others sort, or sum in order, only what can matter.
#include <math.h>
#include <stdlib.h>

#include "pool.h"
#include "scratch.h"
#include "vec.h"

#define BLOCK 1024  // logits whose maximum, or sum of weights, is kept as one number; a multiple of LANES
#define MIN_TEMPERATURE 1e-5f
#define LOWEST (-3.402823466e38f)
#define ONE 1099511627776.0  // 2^40, the best token's weight as an integer: integers add up to the same in any order
#define SMALL 16             // items that are sorted plainly
#define COARSE 64            // logits a maximum stands for when the k-th largest is bounded
#define FINE 8               // the same, for a large k

struct sampling {
    const float *logits;
    int64_t stride, vocab;
    const float *temperature, *top_p, *min_p, *uniform;
    const int32_t *top_k;
    int64_t *out;
};

struct item {
    uint64_t key;  // orders by logit, largest first, then by id
    int64_t weight;
};

struct candidates {
    float *value, *weight;
    int32_t *id;
    struct item *work;
    int64_t count;
};

static vecf load_part(const float *x, int64_t count) {
    float padded[LANES];
    for (int i = 0; i < LANES; i++) padded[i] = i < count ? x[i] : -INFINITY;
    return load_f32(padded);
}

// The first of the largest logits, or the first that is no number.
static int64_t find_best(const float *x, int64_t vocab) {
    float best = -INFINITY;
    int64_t best_block = 0;
    for (int64_t block = 0; block < vocab; block += BLOCK) {
        const int64_t end = block + BLOCK < vocab ? block + BLOCK : vocab;
        vecf top = vec_set(-INFINITY);
        veci broken = {0};
        int64_t i = block;
        for (; i + LANES <= end; i += LANES) {
            vecf v = load_f32(x + i);
            broken |= v != v;
            top = vec_max(top, v);
        }
        if (i < end) {
            vecf v = load_part(x + i, end - i);
            broken |= v != v;
            top = vec_max(top, v);
        }
        int any = 0;
        for (int lane = 0; lane < LANES; lane++) any |= broken[lane];
        if (any)
            for (i = block; i < end; i++)
                if (x[i] != x[i]) return i;
        const float here = vec_top(top);
        if (here > best) {
            best = here;
            best_block = block;
        }
    }
    for (int64_t i = best_block; i < vocab; i++)
        if (x[i] == best) return i;
    return 0;
}

// out[i] = exp((x[i] - best) * inverse); up to LANES - 1 zeros follow.
static void weigh(const float *x, int64_t count, float best, float inverse, float *out) {
    const vecf b = vec_set(best), scale = vec_set(inverse);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store_f32(out + i, vec_exp((load_f32(x + i) - b) * scale));
    if (i < count) store_f32(out + i, vec_exp((load_part(x + i, count - i) - b) * scale));
}

static float sum_weights(const float *x, int64_t count, float best, float inverse) {
    const vecf b = vec_set(best), scale = vec_set(inverse);
    vecf sums[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int j = 0; j < 4; j++) sums[j] += vec_exp((load_f32(x + i + j * LANES) - b) * scale);
    for (; i < count; i += LANES) sums[0] += vec_exp((load_part(x + i, count - i) - b) * scale);
    return vec_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// From the whole vocabulary: the block in which the running sum passes the target, then the token in it.
static int64_t draw_from_all(const float *x, int64_t vocab, float best, float inverse, float uniform) {
    const int64_t num_blocks = (vocab + BLOCK - 1) / BLOCK;
    double *sums = scratch_of(SCRATCH_SAMPLING, (size_t)num_blocks * sizeof(double));
    double total = 0;
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t start = block * BLOCK, left = vocab - start;
        sums[block] = sum_weights(x + start, left < BLOCK ? left : BLOCK, best, inverse);
        total += sums[block];
    }
    const double target = uniform * total;
    double before = 0;
    int64_t block = 0;
    while (block + 1 < num_blocks && before + sums[block] <= target) before += sums[block++];
    const int64_t start = block * BLOCK, count = vocab - start < BLOCK ? vocab - start : BLOCK;
    float weights[BLOCK];
    weigh(x + start, count, best, inverse, weights);
    int64_t chosen = 0;
    for (int64_t i = 0; i < count; i++) {
        if (weights[i] == 0) continue;
        chosen = i;  // the block's last possible token, should its running sum fall short of its sum by a bit
        before += weights[i];
        if (before > target) break;
    }
    return start + chosen;
}

static uint64_t key_of(float value, int32_t id) {
    uint32_t bits;
    value += 0.0f;  // -0 becomes 0, its equal
    memcpy(&bits, &value, 4);
    const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)(~ascending) << 32 | (uint32_t)id;
}

static float value_of(uint64_t key) {
    const uint32_t ascending = ~(uint32_t)(key >> 32);
    const uint32_t bits = ascending >> 31 ? ascending & 0x7fffffffu : ~ascending;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE void swap(struct item *a, struct item *b) {
    struct item t = *a;
    *a = *b;
    *b = t;
}

// Puts the first items by key, as many as it takes for their weights (or with `counting` their number) to reach `need`,
// to the front; how many they are. `need` is positive. Quickselect: each round sums the part that is before a pivot.
static int64_t select_first(struct item *items, int64_t count, int64_t need, int counting) {
    int64_t low = 0, high = count, sum = 0;
    while (high - low > SMALL) {
        const int64_t quarter = (high - low) / 4;
        struct item *a = items + low + quarter, *b = a + quarter, *c = b + quarter;
        struct item *middle = (a->key < b->key) == (b->key < c->key)   ? b
                              : (a->key < b->key) == (c->key < a->key) ? a
                                                                       : c;
        swap(middle, items + high - 1);
        const struct item pivot = items[high - 1];
        int64_t split = low, before = 0;
        for (int64_t i = low; i < high - 1; i++) {  // without a branch, since no one could guess it
            const struct item item = items[i];
            const int64_t is_before = item.key < pivot.key;
            items[i] = items[split];
            items[split] = item;
            before += counting ? is_before : -is_before & item.weight;
            split += is_before;
        }
        swap(items + split, items + high - 1);
        if (sum + before >= need) {
            high = split;
            continue;
        }
        sum += before + (counting ? 1 : pivot.weight);
        low = split + 1;
        if (sum >= need) return low;
    }
    for (int64_t i = low + 1; i < high; i++)
        for (int64_t j = i; j > low && items[j].key < items[j - 1].key; j--) swap(items + j, items + j - 1);
    for (; low < high && sum < need; low++) sum += counting ? 1 : items[low].weight;
    return low;
}

// A logit that at least k logits reach: the k-th largest of the maxima of groups of logits, if there are k groups.
static float bound_of_kth(const float *x, int64_t vocab, int64_t k, struct item *work) {
    for (int group = COARSE; group >= FINE; group = group == COARSE ? FINE : 0) {
        const int64_t num_spans = vocab / (group * LANES);
        if (num_spans * LANES < k) continue;
        for (int64_t span = 0; span < num_spans; span++) {
            const float *start = x + span * group * LANES;
            vecf top = load_f32(start);
            for (int i = 1; i < group; i++) top = vec_max(top, load_f32(start + i * LANES));
            for (int lane = 0; lane < LANES; lane++)
                work[span * LANES + lane] = (struct item){key_of(top[lane], (int32_t)(span * LANES + lane)), 0};
        }
        const int64_t found = select_first(work, num_spans * LANES, k, 1);
        uint64_t last = 0;
        for (int64_t i = 0; i < found; i++)
            if (work[i].key > last) last = work[i].key;
        return fmaxf(value_of(last), LOWEST);
    }
    return LOWEST;
}

// Logits from `bound` on, with their ids, in order of id.
static void collect(const float *x, int64_t vocab, float bound, struct candidates *c) {
    int64_t count = 0, i = 0;
#if VEC512
    __m512i ids = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (; i + LANES <= vocab; i += LANES, ids = _mm512_add_epi32(ids, _mm512_set1_epi32(LANES))) {
        const __m512 v = _mm512_loadu_ps(x + i);
        const __mmask16 kept = _mm512_cmp_ps_mask(v, _mm512_set1_ps(bound), _CMP_GE_OQ);
        if (!kept) continue;
        _mm512_mask_compressstoreu_ps(c->value + count, kept, v);
        _mm512_mask_compressstoreu_epi32(c->id + count, kept, ids);
        count += __builtin_popcount(kept);
    }
#endif
    for (; i < vocab; i++)
        if (x[i] >= bound) {
            c->value[count] = x[i];
            c->id[count++] = (int32_t)i;
        }
    c->count = count;
}

static struct candidates room_for(int64_t vocab) {
    const size_t size = ((size_t)vocab + 2 * LANES) & ~(size_t)(LANES - 1);  // keeps the parts aligned
    char *memory = scratch_of(SCRATCH_SAMPLING, size * (sizeof(struct item) + 3 * 4));
    struct candidates c;
    c.work = (struct item *)memory;
    c.value = (float *)(memory + size * sizeof(struct item));
    c.weight = c.value + size;
    c.id = (int32_t *)(c.weight + size);
    return c;
}

// Drops candidates that are lighter than any of the nucleus: those lighter than (their sum - need) / their number leave
// at least `need`. Again while it pays: each round is a pass over what is left.
static void thin_out(struct candidates *c, double need) {
    for (int64_t before = INT64_MAX; c->count < before / 4 * 3;) {
        before = c->count;
        double sum = 0;
        for (int64_t i = 0; i < before; i++) sum += (double)c->weight[i];
        const float light = (float)((sum - need) / (double)before * 0.999);
        int64_t count = 0;
        for (int64_t i = 0; i < before; i++) {  // without a branch: overwrites what was dropped
            c->value[count] = c->value[i];
            c->weight[count] = c->weight[i];
            c->id[count] = c->id[i];
            count += c->weight[i] >= light;
        }
        c->count = count;
    }
}

// From a part of the vocabulary: gather a superset of it that one comparison finds, then cut that down exactly.
static int64_t draw_from_part(const float *x, int64_t vocab, float best, float inverse, int64_t top_k, float top_p,
                              float min_p, float uniform) {
    struct candidates c = room_for(vocab);
    float bound = LOWEST;
    double total = 0, share = top_k && top_p < 1 ? 0 : min_p;  // top_p's sum is of all that top_k leaves
    if (top_k)
        bound = bound_of_kth(x, vocab, top_k, c.work);
    else if (top_p < 1) {
        for (int64_t start = 0; start < vocab; start += BLOCK)
            total += sum_weights(x + start, vocab - start < BLOCK ? vocab - start : BLOCK, best, inverse);
        // Tokens lighter than this weigh less than 1 - top_p together, so the ones that are not contain the nucleus.
        share = fmax(share, (1 - (double)top_p) * total / (double)vocab);
    }
    // The thousandth is for the rounding of exp and log.
    bound = fmaxf(bound, fminf(best, (float)(best + log(share * 0.999) / inverse)));
    collect(x, vocab, bound, &c);
    weigh(c.value, c.count, best, inverse, c.weight);
    if (!top_k && top_p < 1) thin_out(&c, total * top_p);
    for (int64_t i = 0; i < c.count; i++)
        c.work[i] = (struct item){key_of(c.value[i], c.id[i]), (int64_t)((double)c.weight[i] * ONE)};

    int64_t count = c.count;
    if (top_k) count = select_first(c.work, count, top_k, 1);
    if (top_p < 1) {
        int64_t whole = (int64_t)(total * ONE);
        if (top_k)
            for (int64_t i = whole = 0; i < count; i++) whole += c.work[i].weight;
        const int64_t need = (int64_t)ceil((double)whole * top_p);
        count = select_first(c.work, count, need > 0 ? need : 1, 0);
    }
    uint64_t last = 0, first = ~(uint64_t)0;
    for (int64_t i = 0; i < count; i++) {
        if (c.work[i].key > last) last = c.work[i].key;
        if (c.work[i].key < first) first = c.work[i].key;
    }

    const int64_t lightest = (int64_t)ceil((double)min_p * ONE);
    int64_t num_kept = 0, sum = 0;
    for (int64_t i = 0; i < c.count; i++) {
        const uint64_t key = key_of(c.value[i], c.id[i]);
        const int64_t weight = (int64_t)((double)c.weight[i] * ONE);
        if (key > last || (weight < lightest && key != first)) continue;
        c.work[num_kept++] = (struct item){key, weight};
        sum += weight;
    }
    const int64_t target = (int64_t)(uniform * (double)sum);
    int64_t running = 0, i = 0;
    while (i < num_kept - 1 && (running += c.work[i].weight) <= target) i++;
    return (int32_t)(uint32_t)c.work[i].key;
}

static void sample_job(const void *context, int64_t begin, int64_t end) {
    const struct sampling *s = context;
    for (int64_t row = begin; row < end; row++) {
        const float *x = s->logits + row * s->stride;
        const int64_t best = find_best(x, s->vocab);
        s->out[row] = best;
        if (!(s->temperature[row] >= MIN_TEMPERATURE) || !isfinite(x[best])) continue;
        const float inverse = 1.0f / s->temperature[row];
        const int64_t top_k = s->top_k[row] < s->vocab ? s->top_k[row] : 0;
        const float top_p = s->top_p[row], min_p = s->min_p[row];
        if (top_k <= 0 && top_p >= 1 && min_p <= 0)
            s->out[row] = draw_from_all(x, s->vocab, x[best], inverse, s->uniform[row]);
        else
            s->out[row] = draw_from_part(x, s->vocab, x[best], inverse, top_k, top_p, min_p, s->uniform[row]);
    }
}

struct scoring {
    const float *logits;
    int64_t stride, vocab, num_top;
    const int64_t *ids;
    float *own, *top;
    int64_t *ranks, *top_ids;
};

static int by_key(const void *a, const void *b) {
    const uint64_t x = ((const struct item *)a)->key, y = ((const struct item *)b)->key;
    return (x > y) - (x < y);
}

static int64_t count_above(const float *x, int64_t vocab, float pivot) {
    veci counts = {0};
    int64_t i = 0, count = 0;
    for (; i + LANES <= vocab; i += LANES) counts -= load_f32(x + i) > vec_set(pivot);
    for (int lane = 0; lane < LANES; lane++) count += counts[lane];
    for (; i < vocab; i++) count += x[i] > pivot;
    return count;
}

static void score_job(const void *context, int64_t begin, int64_t end) {
    const struct scoring *s = context;
    for (int64_t row = begin; row < end; row++) {
        const float *x = s->logits + row * s->stride, best = x[find_best(x, s->vocab)], chosen = x[s->ids[row]];
        double sum = 0;
        for (int64_t start = 0; start < s->vocab; start += BLOCK)
            sum += sum_weights(x + start, s->vocab - start < BLOCK ? s->vocab - start : BLOCK, best, 1.0f);
        const double log_sum = (double)best + log(sum);
        s->own[row] = (float)((double)chosen - log_sum);
        s->ranks[row] = count_above(x, s->vocab, chosen) + 1;
        const int64_t num_top = s->num_top;
        if (!num_top) continue;
        struct candidates c = room_for(s->vocab);
        collect(x, s->vocab, bound_of_kth(x, s->vocab, num_top, c.work), &c);
        if (c.count < num_top) collect(x, s->vocab, -INFINITY, &c);
        for (int64_t i = 0; i < c.count; i++) c.work[i] = (struct item){key_of(c.value[i], c.id[i]), 0};
        const int64_t count = select_first(c.work, c.count, num_top, 1);
        qsort(c.work, (size_t)count, sizeof(struct item), by_key);
        for (int64_t i = 0; i < num_top; i++) {
            const int64_t id = i < count ? (int32_t)(uint32_t)c.work[i].key : 0;  // NaN leaves too few
            s->top_ids[row * num_top + i] = id;
            s->top[row * num_top + i] = (float)((double)x[id] - log_sum);
        }
    }
}

// Log-softmax at one id a row, its rank, and the `num_top` largest, which lie side by side.
void orca_token_logprobs(const float *logits, int64_t stride, int64_t rows, int64_t vocab, const int64_t *ids,
                         int64_t num_top, float *own, int64_t *ranks, int64_t *top_ids, float *top) {
    struct scoring context = {logits, stride, vocab, num_top, ids, own, top, ranks, top_ids};
    pool_run(rows, 1, pool_threads(), score_job, &context);
}

// Philox4x32-10 with `seeds` as keys and (position, choice, 0, 0) as counters: the first word's upper 24 bits.
void orca_uniform(const uint64_t *seeds, const uint64_t *positions, const uint64_t *choices, float *out, int64_t rows) {
    for (int64_t row = 0; row < rows; row++) {
        uint32_t low = (uint32_t)seeds[row], high = (uint32_t)(seeds[row] >> 32);
        uint32_t c0 = (uint32_t)positions[row], c1 = (uint32_t)choices[row], c2 = 0, c3 = 0;
        for (int round = 0; round < 10; round++) {
            const uint64_t even = (uint64_t)c0 * 0xD2511F53u, odd = (uint64_t)c2 * 0xCD9E8D57u;
            c0 = (uint32_t)(odd >> 32) ^ c1 ^ low;
            c1 = (uint32_t)odd;
            c2 = (uint32_t)(even >> 32) ^ c3 ^ high;
            c3 = (uint32_t)even;
            low += 0x9E3779B9u;
            high += 0xBB67AE85u;
        }
        out[row] = (float)(c0 >> 8) * 0x1p-24f;
    }
}

// Strides are in elements.
void orca_sample(const float *logits, int64_t stride, int64_t rows, int64_t vocab, const float *temperature,
                 const int32_t *top_k, const float *top_p, const float *min_p, const float *uniform, int64_t *out) {
    struct sampling context = {logits, stride, vocab, temperature, top_p, min_p, uniform, top_k, out};
    pool_run(rows, 1, pool_threads(), sample_job, &context);
}
