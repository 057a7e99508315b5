// What memory and arithmetic allow: memcpy, and p -= lr * g as plain SIMD, with relaxed atomics and with
// compare-and-swap ("Hogwild"), on one thread, on two that split the vector, and on two that share all of it.
//
//   gcc -O3 -march=native -pthread limits.c -o limits
//   limits [N_PARAMS]                                  without it 1e4, 1e6 and 25e6
//
// One JSON line each, the median of 7; gb_per_s counts bytes read and written.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NUM_RUNS 7
#define PARAMS_PER_RUN 100000000 // a run goes over the vector so often that this many parameters were updated
#define PAGE ((size_t)4096)
#define LEARNING_RATE 1e-6f

enum op { COPY, SIMD, RELAXED_32, RELAXED_64, CAS, NUM_OPS };
static const char *op_names[] = {"memcpy", "axpy_simd", "axpy_relaxed32", "axpy_relaxed64", "axpy_cas"};

enum threads { ONE, TWO_SPLIT, TWO_SAME, NUM_THREADS };
static const char *thread_names[] = {"1thr", "2thr_split", "2thr_same_vector"};

typedef struct {
    float *params, *gradient;
    size_t n;
    enum op op;
    int repetitions;
} job;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

__attribute__((noinline)) static void simd(float *restrict p, const float *restrict g, size_t n, float lr) {
    for (size_t i = 0; i < n; i++) p[i] -= lr * g[i];
}

__attribute__((noinline)) static void relaxed_32(float *p, const float *g, size_t n, float lr) {
    uint32_t *cells = (uint32_t *)p;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = __atomic_load_n(cells + i, __ATOMIC_RELAXED);
        float x;
        memcpy(&x, &bits, 4);
        x -= lr * g[i];
        memcpy(&bits, &x, 4);
        __atomic_store_n(cells + i, bits, __ATOMIC_RELAXED);
    }
}

__attribute__((noinline)) static void relaxed_64(float *p, const float *g, size_t n, float lr) {
    uint64_t *cells = (uint64_t *)p; // two floats an access
    for (size_t i = 0; i < n / 2; i++) {
        uint64_t bits = __atomic_load_n(cells + i, __ATOMIC_RELAXED);
        float x[2];
        memcpy(x, &bits, 8);
        x[0] -= lr * g[2 * i];
        x[1] -= lr * g[2 * i + 1];
        memcpy(&bits, x, 8);
        __atomic_store_n(cells + i, bits, __ATOMIC_RELAXED);
    }
}

__attribute__((noinline)) static void compare_and_swap(float *p, const float *g, size_t n, float lr) {
    uint32_t *cells = (uint32_t *)p;
    for (size_t i = 0; i < n; i++) {
        uint32_t old = __atomic_load_n(cells + i, __ATOMIC_RELAXED), bits;
        float x;
        do {
            memcpy(&x, &old, 4);
            x -= lr * g[i];
            memcpy(&bits, &x, 4);
        } while (!__atomic_compare_exchange_n(cells + i, &old, bits, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    }
}

static void *run(void *argument) {
    job *j = argument;
    for (int r = 0; r < j->repetitions; r++) {
        switch (j->op) {
        case COPY: memcpy(j->params, j->gradient, j->n * 4); break;
        case SIMD: simd(j->params, j->gradient, j->n, LEARNING_RATE); break;
        case RELAXED_32: relaxed_32(j->params, j->gradient, j->n, LEARNING_RATE); break;
        case RELAXED_64: relaxed_64(j->params, j->gradient, j->n, LEARNING_RATE); break;
        default: compare_and_swap(j->params, j->gradient, j->n, LEARNING_RATE);
        }
        __asm__ volatile("" ::"r"(j->params) : "memory"); // each repetition is done, for all the compiler knows
    }
    return 0;
}

// Parameters updated per second, by all threads together.
static double measure(float *params, float *gradients[2], size_t n, enum op op, enum threads threads) {
    int repetitions = PARAMS_PER_RUN / n ? PARAMS_PER_RUN / n : 1, num_threads = threads == ONE ? 1 : 2;
    size_t half = n / 2 / (PAGE / 4) * (PAGE / 4); // whole pages
    if (!half) half = n / 2;
    pthread_t ids[2];
    job jobs[2];
    for (int i = 0; i < num_threads; i++) {
        if (threads == TWO_SPLIT)
            jobs[i] = (job){params + i * half, gradients[0] + i * half, i ? n - half : half, op, repetitions};
        else
            jobs[i] = (job){params, gradients[i], n, op, repetitions};
    }
    double start = now();
    for (int i = 0; i < num_threads; i++) pthread_create(ids + i, 0, run, jobs + i);
    for (int i = 0; i < num_threads; i++) pthread_join(ids[i], 0);
    return (double)n * repetitions * (threads == TWO_SAME ? 2 : 1) / (now() - start);
}

static void measure_size(size_t n) {
    size_t bytes = (n * 4 + 2 * PAGE - 1) / PAGE * PAGE;
    float *params = aligned_alloc(PAGE, bytes);
    float *gradients[] = {aligned_alloc(PAGE, bytes), aligned_alloc(PAGE, bytes)};
    for (size_t i = 0; i < n; i++) {
        params[i] = 1;
        gradients[0][i] = (float)(i % 7);
        gradients[1][i] = 1;
    }
    for (enum op op = 0; op < NUM_OPS; op++) {
        for (enum threads threads = 0; threads < NUM_THREADS; threads++) {
            if (op == COPY && threads == TWO_SAME) continue;
            double rate[NUM_RUNS];
            for (int k = 0; k < NUM_RUNS; k++) rate[k] = measure(params, gradients, n, op, threads);
            qsort(rate, NUM_RUNS, sizeof *rate, by_value);
            double median = rate[NUM_RUNS / 2];
            printf("{\"system\":\"limit:%s:%s\",\"n_params\":%zu,\"workers\":%d,\"updates_per_s\":%.1f,"
                   "\"gb_per_s\":%.2f,\"gparams_per_s\":%.3f,\"gparams_min\":%.3f,\"gparams_max\":%.3f}\n",
                   op_names[op], thread_names[threads], n, threads == ONE ? 1 : 2, median / n,
                   median * (op == COPY ? 8 : 12) / 1e9, median / 1e9, rate[0] / 1e9, rate[NUM_RUNS - 1] / 1e9);
            fflush(stdout);
        }
    }
    free(params);
    free(gradients[0]);
    free(gradients[1]);
}

int main(int argc, char **argv) {
    if (argc > 1) {
        measure_size(strtoull(argv[1], 0, 10));
        return 0;
    }
    measure_size(10000);
    measure_size(1000000);
    measure_size(25000000);
    return 0;
}
