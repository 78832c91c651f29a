#define _GNU_SOURCE
#include "scratch.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#define HUGE_PAGE_BYTES (2 << 20)

static _Thread_local struct {
    size_t capacity;
    void *memory;
} pieces[SCRATCH_USERS];

void *scratch_of(enum scratch_user user, size_t bytes) {
    if (pieces[user].capacity < bytes) {
        free(pieces[user].memory);
        pieces[user].capacity = (bytes + 63) / 64 * 64;
        pieces[user].memory = aligned_alloc(64, pieces[user].capacity);
        if (!pieces[user].memory) abort();
    }
    return pieces[user].memory;
}

// Asks for huge pages within the given memory; what the system answers makes no difference to the caller.
void orca_huge_pages(char *memory, int64_t bytes) {
    const uintptr_t begin = ((uintptr_t)memory + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    const uintptr_t end = ((uintptr_t)memory + (uintptr_t)bytes) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    if (begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
}
