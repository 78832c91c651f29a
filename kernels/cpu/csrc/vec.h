// One vector of floats, wide as the machine's registers, and the element types that are widened into it.
// Written with the compiler's vector types, so that it compiles for any machine; intrinsics only where they save work.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define VEC512 1
#define LANES 16
#else
#define VEC512 0
#define LANES 8
#endif

#define INLINE static inline __attribute__((always_inline))
#define KEEP_ORDER __asm__ volatile("" ::: "memory")  // the compiler moves no load or store across

typedef float vecf __attribute__((vector_size(4 * LANES)));
typedef int32_t veci __attribute__((vector_size(4 * LANES)));
typedef uint32_t vecu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vech __attribute__((vector_size(2 * LANES)));
typedef float vecf_mem __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vecu_mem __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint16_t vech_mem __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

typedef struct {
    uint16_t bits;
} bf16;
typedef struct {
    uint16_t bits;
} fp16;

enum dtype { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

INLINE vecf vec_set(float x) {
    return x - (vecf){};
}

INLINE veci vec_lanes(void) {  // {0, 1, 2, ...}
#if VEC512
    return (veci){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
    return (veci){0, 1, 2, 3, 4, 5, 6, 7};
#endif
}

INLINE vecf vec_fma(vecf a, vecf b, vecf c) {
#if VEC512
    return (vecf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vecf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE vecf vec_select(veci mask, vecf a, vecf b) {  // lanes of a where the mask is all ones
    return (vecf)((mask & (veci)a) | (~mask & (veci)b));
}

INLINE vecf vec_max(vecf a, vecf b) {
#if VEC512
    return (vecf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return vec_select(a > b, a, b);
#endif
}

INLINE vecf vec_min(vecf a, vecf b) {
#if VEC512
    return (vecf)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return vec_select(a < b, a, b);
#endif
}

// Horizontal sums fold halves on halves.
INLINE float vec_sum(vecf v) {
#if VEC512
    return _mm512_reduce_add_ps((__m512)v);
#else
    float x[LANES];
    memcpy(x, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
#endif
}

INLINE float vec_top(vecf v) {
#if VEC512
    return _mm512_reduce_max_ps((__m512)v);
#else
    float top = v[0];
    for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
    return top;
#endif
}

// exp(x) within 2 units in the last place: x = n ln 2 + r, a polynomial for exp(r) (coefficients of the Taylor series
// suffice for |r| <= ln 2 / 2 in float32), times 2^n. exp(0) is exactly 1. Below -87.3, where the result would no
// longer be a normal number, it is exactly 0: one masked score would else cost a hundred cycles of microcode. NaN stays
// NaN, for vec_max and vec_min return their second operand when it is one.
INLINE vecf vec_exp(vecf x) {
    const vecf shift = vec_set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const vecf least = vec_set(-87.3f);
    vecf y = vec_min(vec_set(88.37f), vec_max(least, x));
    vecf shifted = vec_fma(y, vec_set(1.44269504f), shift);
    vecf n = shifted - shift;
    vecf r = vec_fma(n, vec_set(-0.693145752f), y);
    r = vec_fma(n, vec_set(-1.42860677e-6f), r);
    vecf p = vec_fma(r, vec_set(1.0f / 720), vec_set(1.0f / 120));
    p = vec_fma(p, r, vec_set(1.0f / 24));
    p = vec_fma(p, r, vec_set(1.0f / 6));
    p = vec_fma(p, r, vec_set(0.5f));
    p = vec_fma(p, r, vec_set(1.0f));
    p = vec_fma(p, r, vec_set(1.0f));
#if VEC512
    const __mmask16 keep = _mm512_cmp_ps_mask((__m512)x, (__m512)least, _CMP_NLT_UQ);
    return (vecf)_mm512_maskz_scalef_ps(keep, (__m512)p, (__m512)n);
#else
    veci exponent = ((veci)shifted - (veci)shift) + 127;
    return (vecf)(~(x < least) & (veci)(p * (vecf)(exponent << 23)));
#endif
}

INLINE vecf vec_tanh(vecf x) {  // 1 - 2 / (exp(2x) + 1)
    return vec_set(1.0f) - vec_set(2.0f) / (vec_exp(x + x) + vec_set(1.0f));
}

// Memory <-> vector. Every element type offers load_, store_ (rounding to nearest even), and the same for one element.
INLINE vecf load_f32(const float *p) {
    return (vecf) * (const vecf_mem *)p;
}
INLINE void store_f32(float *p, vecf v) {
    *(vecf_mem *)p = (vecf_mem)v;
}
INLINE float get_f32(const float *p) {
    return *p;
}
INLINE void put_f32(float *p, float x) {
    *p = x;
}

INLINE vecf load_bf16(const bf16 *p) {
#if VEC512
    return (vecf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    return (vecf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    vech half = (vech) * (const vech_mem *)p;
    return (vecf)(__builtin_convertvector(half, vecu) << 16);
#endif
}
INLINE float get_bf16(const bf16 *p) {
    uint32_t bits = (uint32_t)p->bits << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE void put_bf16(bf16 *p, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x)
        p->bits = (uint16_t)((bits >> 16) | 0x40);
    else
        p->bits = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE void store_bf16(bf16 *p, vecf v) {
#if VEC512 && defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
    vecu bits = (vecu)v;
    vecu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vecu quiet = (bits >> 16) | 0x40;
    vecu nan = (vecu)(v != v);
    *(vech_mem *)p = (vech_mem) __builtin_convertvector((nan & quiet) | (~nan & rounded), vech);
#endif
}

INLINE float get_fp16(const fp16 *p) {
    _Float16 x;
    memcpy(&x, p, 2);
    return (float)x;
}
INLINE void put_fp16(fp16 *p, float x) {
    _Float16 y = (_Float16)x;
    memcpy(p, &y, 2);
}
INLINE vecf load_fp16(const fp16 *p) {
#if VEC512
    return (vecf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (vecf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vecf v;
    for (int i = 0; i < LANES; i++) v[i] = get_fp16(p + i);
    return v;
#endif
}
INLINE void store_fp16(fp16 *p, vecf v) {
#if VEC512
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < LANES; i++) put_fp16(p + i, v[i]);
#endif
}

// A lane of bf16 pairs holds two neighbours; each widens to a float in one instruction.
INLINE vecf first_of_pair(vecu pairs) {
    return (vecf)(pairs << 16);
}
INLINE vecf second_of_pair(vecu pairs) {
    return (vecf)(pairs & 0xffff0000u);
}

// Transposes a LANES x LANES square of 32-bit elements in registers.
INLINE void transpose(vecu *rows) {
#if VEC512
    __m512i t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // now u[i + j] holds column 4 l + j of rows i to i + 3 in its quarter l
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
        __m512i even_top = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x88),
                odd_top = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xdd);
        __m512i even_low = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x88);
        __m512i odd_low = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xdd);
        rows[j] = (vecu)_mm512_shuffle_i32x4(even_top, even_low, 0x88);
        rows[4 + j] = (vecu)_mm512_shuffle_i32x4(odd_top, odd_low, 0x88);
        rows[8 + j] = (vecu)_mm512_shuffle_i32x4(even_top, even_low, 0xdd);
        rows[12 + j] = (vecu)_mm512_shuffle_i32x4(odd_top, odd_low, 0xdd);
    }
#else
    static const veci low[3] = {{0, 8, 2, 10, 4, 12, 6, 14}, {0, 1, 8, 9, 4, 5, 12, 13}, {0, 1, 2, 3, 8, 9, 10, 11}};
    static const veci high[3] = {
        {1, 9, 3, 11, 5, 13, 7, 15}, {2, 3, 10, 11, 6, 7, 14, 15}, {4, 5, 6, 7, 12, 13, 14, 15}};
#pragma GCC unroll 3
    for (int round = 0; round < 3; round++)
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const int j = i + (1 << round);
            if (i & (1 << round)) continue;
            vecu a = rows[i], b = rows[j];
            rows[i] = __builtin_shuffle(a, b, low[round]);
            rows[j] = __builtin_shuffle(a, b, high[round]);
        }
#endif
}

// The same from memory: rows[i] points to LANES elements, column j goes to to + j * stride.
INLINE void transpose_rows(const char *const *rows, int64_t offset, uint32_t *to, int64_t stride) {
#if VEC512
    // Quarters of four rows are put into one register by loads, which leaves the shuffles within quarters alone.
    for (int quarter = 0; quarter < 4; quarter++) {
        __m512i t[4];
        for (int i = 0; i < 4; i++) {
            const int64_t at = offset + 16 * quarter;
            t[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[i] + at)));
            t[i] = _mm512_inserti32x4(t[i], _mm_loadu_si128((const __m128i *)(rows[4 + i] + at)), 1);
            t[i] = _mm512_inserti32x4(t[i], _mm_loadu_si128((const __m128i *)(rows[8 + i] + at)), 2);
            t[i] = _mm512_inserti32x4(t[i], _mm_loadu_si128((const __m128i *)(rows[12 + i] + at)), 3);
        }
        __m512i a = _mm512_unpacklo_epi32(t[0], t[1]), b = _mm512_unpackhi_epi32(t[0], t[1]);
        __m512i c = _mm512_unpacklo_epi32(t[2], t[3]), d = _mm512_unpackhi_epi32(t[2], t[3]);
        uint32_t *out = to + 4 * quarter * stride;
        _mm512_storeu_si512(out, _mm512_unpacklo_epi64(a, c));
        _mm512_storeu_si512(out + stride, _mm512_unpackhi_epi64(a, c));
        _mm512_storeu_si512(out + 2 * stride, _mm512_unpacklo_epi64(b, d));
        _mm512_storeu_si512(out + 3 * stride, _mm512_unpackhi_epi64(b, d));
    }
#else
    vecu square[LANES];
    for (int i = 0; i < LANES; i++) square[i] = (vecu) * (const vecu_mem *)(rows[i] + offset);
    transpose(square);
    for (int i = 0; i < LANES; i++) *(vecu_mem *)(to + i * stride) = (vecu_mem)square[i];
#endif
}

// {a0, b0, a1, b1, ...} to memory, 2 * LANES floats.
INLINE void interleave(vecf a, vecf b, float *to) {
#if VEC512
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    store_f32(to, (vecf)_mm512_permutex2var_ps((__m512)a, low, (__m512)b));
    store_f32(to + LANES, (vecf)_mm512_permutex2var_ps((__m512)a, high, (__m512)b));
#else
    static const veci low = {0, 8, 1, 9, 2, 10, 3, 11}, high = {4, 12, 5, 13, 6, 14, 7, 15};
    store_f32(to, __builtin_shuffle(a, b, low));
    store_f32(to + LANES, __builtin_shuffle(a, b, high));
#endif
}
