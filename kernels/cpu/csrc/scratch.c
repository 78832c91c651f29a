#include "scratch.h"

#include <stdlib.h>

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
