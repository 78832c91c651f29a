// Working memory of one thread: it grows to the largest request and stays.
#pragma once

#include <stddef.h>

void *scratch_of(size_t bytes);  // aligned to 64 bytes; holds until this thread's next call
