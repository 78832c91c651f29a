// Working memory of one thread, a piece for each user: it grows to the largest request and stays.
#pragma once

#include <stddef.h>

enum scratch_user { SCRATCH_LINEAR, SCRATCH_ATTENTION, SCRATCH_DECODER, SCRATCH_SAMPLING, SCRATCH_USERS };

void *scratch_of(enum scratch_user user, size_t bytes);  // aligned to 64 bytes; holds until the user's next call
