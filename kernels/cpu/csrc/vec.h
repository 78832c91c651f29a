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

// Horizontal sums and maxima fold halves on halves: one fixed order on every machine width.
INLINE float vec_sum(vecf v) {
    float x[LANES];
    memcpy(x, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
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
// suffice for |r| <= ln 2 / 2 in float32), 2^n through the exponent bits. exp(0) is exactly 1; below -87 it is 0.
INLINE vecf vec_exp(vecf x) {
    const vecf shift = vec_set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vecf y = vec_min(vec_max(x, vec_set(-87.0f)), vec_set(88.37f));
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
    veci exponent = ((veci)shifted - (veci)shift) << 23;
    vecf result = (vecf)((veci)p + exponent);
#if VEC512
    return (vecf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ), (__m512)result);
#else
    return (vecf)((x >= vec_set(-87.0f)) & (veci)result);
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
    *(vech_mem *)p = (vech_mem)__builtin_convertvector((nan & quiet) | (~nan & rounded), vech);
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

// Transposes a LANES x LANES square of 32-bit elements in registers: log2(LANES) rounds of exchanges.
INLINE void transpose(vecu *rows) {
#pragma GCC unroll 4
    for (int stride = 1; stride < LANES; stride *= 2) {
        veci low, high;
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) {
            low[j] = (j & stride) ? LANES + j - stride : j;
            high[j] = (j & stride) ? LANES + j : j + stride;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & stride) continue;
            vecu a = rows[i], b = rows[i + stride];
            rows[i] = __builtin_shuffle(a, b, low);
            rows[i + stride] = __builtin_shuffle(a, b, high);
        }
    }
}
