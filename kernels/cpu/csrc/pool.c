// Between two steps the members sleep on a futex and cost nothing; within a step they spin for SPIN_NS first, since the
// next operation comes a few microseconds after the last. A member that is late (its core was taken by another process)
// is not waited for: the caller does the work itself, and only waits for members that are inside an item.
#define _GNU_SOURCE
#include "pool.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "vec.h"

#define MAX_THREADS 128
#define SPIN_NS 50000
#define JOIN_SPIN_NS 20000

struct range {
    _Alignas(64) atomic_llong next;
    int64_t end;
};

static struct {
    pthread_mutex_t caller;           // held by whoever has a job running
    _Alignas(64) atomic_uint word;    // odd: a job is open. Counts up by one at every opening and closing; the futex
    _Alignas(64) atomic_uint inside;  // members at work; a futex of the caller, once all items are taken
    atomic_int caller_asleep;
    _Alignas(64) atomic_int asleep;
    int members;  // threads started, the caller not counted
    atomic_int wanted;
    int team;
    int64_t grain;
    job_fn run;
    const void *context;
    struct range ranges[MAX_THREADS];
} pool = {.caller = PTHREAD_MUTEX_INITIALIZER, .wanted = 1};

static void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Its own range first, then what the others have left.
static void work(int thread) {
    for (int i = 0; i < pool.team; i++) {
        struct range *range = &pool.ranges[(thread + i) % pool.team];
        for (;;) {
            int64_t begin = atomic_fetch_add(&range->next, pool.grain);
            if (begin >= range->end) break;
            int64_t end = begin + pool.grain < range->end ? begin + pool.grain : range->end;
            pool.run(pool.context, begin, end);
        }
    }
}

static unsigned await_job(unsigned seen) {
    int64_t deadline = now_ns() + SPIN_NS;
    for (;;) {
        for (int i = 0; i < 32; i++) {
            unsigned word = atomic_load(&pool.word);
            if (word != seen && (word & 1)) return word;
            relax();
        }
        if (now_ns() < deadline) continue;
        unsigned word = atomic_load(&pool.word);
        if (word != seen && (word & 1)) return word;
        atomic_fetch_add(&pool.asleep, 1);
        syscall(SYS_futex, &pool.word, FUTEX_WAIT_PRIVATE, word, NULL, NULL, 0);
        atomic_fetch_sub(&pool.asleep, 1);
        deadline = now_ns() + SPIN_NS;
    }
}

static void *member(void *argument) {
    int thread = (int)(intptr_t)argument;
    unsigned seen = 0;
    for (;;) {
        await_job(seen);
        // Enter first, look again second: the caller closes the job first and looks for members inside second, so one
        // of the two sees the other. An open job found here may be a newer one; that is as good.
        atomic_fetch_add(&pool.inside, 1);
        seen = atomic_load(&pool.word);
        if ((seen & 1) && thread < pool.team) work(thread);
        if (atomic_fetch_sub(&pool.inside, 1) == 1 && atomic_load(&pool.caller_asleep))
            syscall(SYS_futex, &pool.inside, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    }
    return NULL;
}

static void grow(int threads) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals belong to the threads that Python knows
    while (pool.members + 1 < threads) {
        pthread_t handle;
        if (pthread_create(&handle, NULL, member, (void *)(intptr_t)(pool.members + 1))) break;
        pthread_detach(handle);
        pool.members++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// The last items end within microseconds, unless a member lost its core in one. Then the caller gives up its own, so
// that the system may put the member there.
static void await_members(void) {
    const int64_t deadline = now_ns() + JOIN_SPIN_NS;
    for (unsigned inside; (inside = atomic_load(&pool.inside));) {
        if (now_ns() < deadline) {
            relax();
            continue;
        }
        atomic_store(&pool.caller_asleep, 1);
        syscall(SYS_futex, &pool.inside, FUTEX_WAIT_PRIVATE, inside, NULL, NULL, 0);
        atomic_store(&pool.caller_asleep, 0);
    }
}

void pool_run(int64_t count, int64_t grain, int threads, job_fn run, const void *context) {
    if (count <= 0) return;
    if (threads > count) threads = (int)count;
    if (threads <= 1 || pthread_mutex_trylock(&pool.caller)) {
        run(context, 0, count);
        return;
    }
    if (pool.members + 1 < threads) grow(threads);
    pool.team = threads;
    pool.grain = grain;
    pool.run = run;
    pool.context = context;
    for (int i = 0; i < threads; i++) {
        atomic_store_explicit(&pool.ranges[i].next, count * i / threads, memory_order_relaxed);
        pool.ranges[i].end = count * (i + 1) / threads;
    }
    atomic_fetch_add(&pool.word, 1);
    if (atomic_load(&pool.asleep)) syscall(SYS_futex, &pool.word, FUTEX_WAKE_PRIVATE, pool.members, NULL, NULL, 0);
    work(0);
    atomic_fetch_add(&pool.word, 1);
    if (atomic_load(&pool.inside)) await_members();
    pthread_mutex_unlock(&pool.caller);
}

int pool_threads(void) {
    return atomic_load_explicit(&pool.wanted, memory_order_relaxed);
}

int orca_set_num_threads(int threads) {
    if (threads < 1 || threads > MAX_THREADS) return -1;
    atomic_store(&pool.wanted, threads);
    return 0;
}

int orca_num_threads(void) {
    return pool_threads();
}
