#include "scratch.h"

#include <stdlib.h>

static _Thread_local size_t capacity;
static _Thread_local void *memory;

void *scratch_of(size_t bytes) {
    if (capacity < bytes) {
        free(memory);
        capacity = (bytes + 63) / 64 * 64;
        memory = aligned_alloc(64, capacity);
        if (!memory) abort();
    }
    return memory;
}
