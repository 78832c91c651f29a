// An all-reduce, a gather and a broadcast between processes that map the same memory.
//
// Layout of the region: a control page, then for each of two generations one buffer of `capacity` bytes per rank. A
// collective copies the caller's data into its own buffer of the current generation, announces it by storing the
// sequence number in its `arrived` word, and waits for the others'. Two generations are enough: whoever announces
// number s has finished reading number s - 1, so a buffer is written again only when all have left it.
//
// Waiting spins for a bounded while, then sleeps on a futex of the rank it waits for.

#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 32, CONTROL_BYTES = 8192 };

typedef struct {
    _Alignas(128) _Atomic uint32_t arrived;
    _Atomic uint32_t sleepers;
} Mark;

typedef struct Group {
    uint8_t *region;
    int64_t capacity;   // bytes of one buffer
    int64_t spins;      // how often to look before sleeping
    double timeout_s;
    int32_t rank;
    int32_t size;
    uint32_t sequence;  // of the collective that ran last
} Group;

_Static_assert(sizeof(Mark) * MAX_RANKS <= CONTROL_BYTES, "the marks do not fit the control page");

int64_t orca_shm_region_bytes(int32_t size, int64_t capacity) { return CONTROL_BYTES + 2 * size * capacity; }

static Mark *mark_of(const Group *group, int rank) { return (Mark *)group->region + rank; }

static uint8_t *buffer_of(const Group *group, int rank) {
    int64_t place = (group->sequence & 1) * group->size + rank;
    return group->region + CONTROL_BYTES + place * group->capacity;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static void announce(Group *group) {
    Mark *own = mark_of(group, group->rank);
    atomic_store_explicit(&own->arrived, group->sequence, memory_order_seq_cst);
    if (atomic_load_explicit(&own->sleepers, memory_order_seq_cst))
        syscall(SYS_futex, &own->arrived, FUTEX_WAKE, MAX_RANKS, NULL, NULL, 0);
}

static int has_arrived(const Mark *mark, uint32_t sequence) {
    return (int32_t)(atomic_load_explicit(&mark->arrived, memory_order_acquire) - sequence) >= 0;
}

static int wait_for(const Group *group, int rank) {
    Mark *mark = mark_of(group, rank);
    for (int64_t i = 0; i < group->spins; i++) {
        if (has_arrived(mark, group->sequence)) return 0;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    const double deadline = seconds_now() + group->timeout_s;
    const struct timespec nap = {0, 100 * 1000 * 1000};
    while (!has_arrived(mark, group->sequence)) {
        if (seconds_now() > deadline) return -ETIMEDOUT;
        atomic_fetch_add(&mark->sleepers, 1);
        uint32_t seen = atomic_load(&mark->arrived);
        if ((int32_t)(seen - group->sequence) < 0) syscall(SYS_futex, &mark->arrived, FUTEX_WAIT, seen, &nap, NULL, 0);
        atomic_fetch_sub(&mark->sleepers, 1);
    }
    return 0;
}

static int wait_for_all(const Group *group) {
    for (int rank = 0; rank < group->size; rank++) {
        int error = rank == group->rank ? 0 : wait_for(group, rank);
        if (error) return error;
    }
    return 0;
}

static float widen_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t round_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16) | 0x40;  // keep NaN a NaN
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// One block of sums at a time, in rank order and in float, so that all ranks round the same number once.
#define DEFINE_SUM(NAME, TYPE, LOAD, STORE)                                        \
    static void NAME(const Group *group, TYPE *out, int64_t count) {               \
        enum { BLOCK = 512 };                                                      \
        float sum[BLOCK];                                                          \
        for (int64_t at = 0; at < count; at += BLOCK) {                            \
            int64_t n = count - at < BLOCK ? count - at : BLOCK;                   \
            const TYPE *first = (const TYPE *)buffer_of(group, 0) + at;            \
            for (int64_t i = 0; i < n; i++) sum[i] = LOAD(first[i]);               \
            for (int rank = 1; rank < group->size; rank++) {                       \
                const TYPE *part = (const TYPE *)buffer_of(group, rank) + at;      \
                for (int64_t i = 0; i < n; i++) sum[i] += LOAD(part[i]);           \
            }                                                                      \
            for (int64_t i = 0; i < n; i++) out[at + i] = STORE(sum[i]);           \
        }                                                                          \
    }

#define SAME(x) (x)
DEFINE_SUM(sum_f32, float, SAME, SAME)
DEFINE_SUM(sum_bf16, uint16_t, widen_bf16, round_bf16)

// kind: 0 float32, 1 bfloat16. data holds `count` elements; the sum over ranks replaces them.
int orca_shm_all_reduce(Group *group, void *data, int64_t count, int kind) {
    const int64_t width = kind == 0 ? 4 : 2, most = group->capacity / width;
    for (int64_t at = 0; at < count; at += most) {
        const int64_t n = count - at < most ? count - at : most;
        uint8_t *piece = (uint8_t *)data + at * width;
        group->sequence++;
        memcpy(buffer_of(group, group->rank), piece, n * width);
        announce(group);
        int error = wait_for_all(group);
        if (error) return error;
        if (kind == 0) sum_f32(group, (float *)piece, n);
        else sum_bf16(group, (uint16_t *)piece, n);
    }
    return 0;
}

// Copies rank 0's `count` bytes to all.
int orca_shm_broadcast(Group *group, uint8_t *data, int64_t count) {
    for (int64_t at = 0; at < count; at += group->capacity) {
        const int64_t n = count - at < group->capacity ? count - at : group->capacity;
        group->sequence++;
        if (group->rank == 0) memcpy(buffer_of(group, 0), data + at, n);
        announce(group);
        int error = wait_for_all(group);
        if (error) return error;
        if (group->rank != 0) memcpy(data + at, buffer_of(group, 0), n);
    }
    return 0;
}

// Rank r's matrix of `rows` rows, each starts[r + 1] - starts[r] bytes, lands at byte starts[r] of rank 0's rows of
// starts[size] bytes. `out` is read on rank 0 alone.
int orca_shm_gather(Group *group, const uint8_t *own, uint8_t *out, int64_t rows, const int64_t *starts) {
    const int64_t pitch = starts[group->size], width = starts[group->rank + 1] - starts[group->rank];
    int64_t widest = 1;
    for (int rank = 0; rank < group->size; rank++)
        if (starts[rank + 1] - starts[rank] > widest) widest = starts[rank + 1] - starts[rank];
    const int64_t column_step = widest < group->capacity ? widest : group->capacity;
    const int64_t row_step = group->capacity / column_step;
    for (int64_t row = 0; row < rows; row += row_step) {
        const int64_t num_rows = rows - row < row_step ? rows - row : row_step;
        for (int64_t column = 0; column < widest; column += column_step) {
            group->sequence++;
            if (group->rank != 0 && column < width) {
                const int64_t n = width - column < column_step ? width - column : column_step;
                for (int64_t r = 0; r < num_rows; r++)
                    memcpy(buffer_of(group, group->rank) + r * n, own + (row + r) * width + column, n);
            }
            announce(group);
            int error = wait_for_all(group);
            if (error) return error;
            if (group->rank != 0) continue;
            for (int rank = 0; rank < group->size; rank++) {
                const int64_t theirs = starts[rank + 1] - starts[rank];
                if (column >= theirs) continue;
                const int64_t n = theirs - column < column_step ? theirs - column : column_step;
                for (int64_t r = 0; r < num_rows; r++) {
                    const uint8_t *from = rank == 0 ? own + (row + r) * width + column : buffer_of(group, rank) + r * n;
                    memcpy(out + (row + r) * pitch + starts[rank] + column, from, n);
                }
            }
        }
    }
    return 0;
}
