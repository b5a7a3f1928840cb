// What all calls of the stand-in share: settings, the log, results that a test injects, and refusals.
#pragma once
#define _GNU_SOURCE

#include <cuda.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { kMaxFunctions = 64, kDefaultShared = 48 * 1024, kFatbinMagic = 0xBA55ED50u };

struct CUmod_st {
    CUcontext context;
    int index;
};

struct CUfunc_st {
    char name[160];
    CUcontext context;
    int max_dynamic_shared;
    int any_cluster_size;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local CUcontext current;

static long number(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text && *text ? strtol(text, NULL, 0) : otherwise;
}

static int capability(void) { return (int)number("FAKE_CC", 90); }
static int shared_limit(void) { return (int)number("FAKE_SHARED", 227 * 1024); }

__attribute__((format(printf, 1, 2))) static void record(const char* format, ...) {
    const char* path = getenv("FAKE_LOG");
    if (!path) return;
    pthread_mutex_lock(&lock);
    FILE* file = fopen(path, "a");
    if (file) {
        va_list arguments;
        va_start(arguments, format);
        vfprintf(file, format, arguments);
        va_end(arguments);
        fputc('\n', file);
        fclose(file);
    }
    pthread_mutex_unlock(&lock);
}

// The injected result of this call, if FAKE_FAIL names it.
static CUresult injected(const char* function) {
    static struct {
        const char* function;
        int calls;
    } counts[kMaxFunctions];
    pthread_mutex_lock(&lock);
    int i = 0;
    while (counts[i].function && strcmp(counts[i].function, function)) ++i;
    counts[i].function = function;
    const int call = ++counts[i].calls;
    pthread_mutex_unlock(&lock);
    char name[64];
    int nth, code;
    const char* text = getenv("FAKE_FAIL");
    if (!text || sscanf(text, "%63[^:]:%d:%d", name, &nth, &code) != 3) return CUDA_SUCCESS;
    return !strcmp(name, function) && nth == call ? (CUresult)code : CUDA_SUCCESS;
}

// A refusal that the real driver would also make; `rule` tells the test which one.
static CUresult refuse(const char* function, CUresult code, const char* rule) {
    record("{\"call\": \"refused\", \"function\": \"%s\", \"code\": %d, \"rule\": \"%s\"}", function, code, rule);
    return code;
}

#define ENTER()                                     \
    do {                                            \
        const CUresult wanted = injected(__func__); \
        if (wanted != CUDA_SUCCESS) return wanted;  \
    } while (0)
#define REQUIRE(condition, code) \
    if (!(condition)) return refuse(__func__, code, #condition)
