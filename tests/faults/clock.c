/* Loaded before libc: the time of day jumps by CLOCK_JUMP_S seconds as soon as the file CLOCK_JUMP_WHEN is there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int (*real)(clockid_t, struct timespec *);

static long jump(void) {
    return access(getenv("CLOCK_JUMP_WHEN"), F_OK) ? 0 : atol(getenv("CLOCK_JUMP_S"));
}

int clock_gettime(clockid_t clock, struct timespec *told) {
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    long by = jump();
    int failed = real(clock, told);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) told->tv_sec += by;
    return failed;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict told, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    told->tv_sec = now.tv_sec;
    told->tv_usec = now.tv_nsec / 1000;
    return 0;
}
