// A team of threads that shares out the items of one job.
#pragma once

#include <stdint.h>

typedef void (*job_fn)(const void *context, int64_t begin, int64_t end);  // works on items [begin, end)

// Runs every item of [0, count) once, at most `grain` of them at a time, and returns when all are done. Which thread
// runs which item is left open, so an item's result must not depend on it. One thread when `threads` is 1, or when
// the team is at work for another caller.
void pool_run(int64_t count, int64_t grain, int threads, job_fn run, const void *context);

int pool_threads(void);
