// What the loopback device can carry, and the reference: a parameter server over raw sockets, in C.
//
//   gcc -O3 -march=native -pthread sock.c -o sock
//   sock stream tcp|unix|shm CHUNK_BYTES               bulk transfer one way
//   sock ping   tcp|unix     BYTES                     round trips
//   sock ps     tcp|unix     N_PARAMS WORKERS MODE S   MODE 0: push all, apply, pull all
//                                                      MODE 1: pipelined by chunk, both directions at once
//
// Each prints one JSON line. In `ps` every worker pushes N float32 gradients and pulls the N updated parameters, over
// and over for S seconds, from one server process with a thread per connection. There is no protocol, no checksum,
// no lock: workers' updates may get lost in one another. That is what a real server is measured against.
// SOCKBUF=BYTES sets the sizes of the socket buffers; without it the kernel tunes them.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define MAX_WORKERS 256
#define MAX_LATENCIES 65536             // per worker; more round trips are counted, but not in the percentiles
#define NUM_WARM_UPS 3                  // round trips before the clock starts
#define SERVER_CHUNK ((size_t)256 << 10) // what the pipelined server receives, applies and sends at a time
#define CLIENT_CHUNK MIB                // most that a worker hands to one system call
#define CLIENT_WINDOW (8 * MIB)         // most that a pipelined worker sends ahead of what it has received
#define LEARNING_RATE 1e-6f

// ---------------------------------------------------------------------------------------------- clocks and order

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double cpu_seconds(int who) {
    struct rusage r;
    getrusage(who, &r);
    return r.ru_utime.tv_sec + r.ru_utime.tv_usec * 1e-6 + r.ru_stime.tv_sec + r.ru_stime.tv_usec * 1e-6;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

// ---------------------------------------------------------------------------------------------- sockets

static int listener, port, is_unix; // `port` is in network order; for unix sockets it is what makes the name unique

static void send_all(int fd, const void *data, size_t bytes, size_t chunk) {
    const char *p = data;
    while (bytes) {
        ssize_t sent = send(fd, p, bytes < chunk ? bytes : chunk, MSG_NOSIGNAL);
        if (sent <= 0) {
            if (errno == EINTR) continue;
            _exit(1);
        }
        p += sent;
        bytes -= sent;
    }
}

static int receive_all(int fd, void *data, size_t bytes, size_t chunk) {
    char *p = data;
    while (bytes) {
        ssize_t got = recv(fd, p, bytes < chunk ? bytes : chunk, 0);
        if (got <= 0) return -1;
        p += got;
        bytes -= got;
    }
    return 0;
}

static struct sockaddr_un unix_address(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    sprintf(address.sun_path + 1, "psbench%d", port); // abstract: nothing to delete
    return address;
}

static void start_listening(void) {
    if (is_unix) {
        port = getpid();
        struct sockaddr_un address = unix_address();
        listener = socket(AF_UNIX, SOCK_STREAM, 0);
        bind(listener, (void *)&address, sizeof address);
        listen(listener, MAX_WORKERS);
        return;
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    bind(listener, (void *)&address, sizeof address);
    listen(listener, MAX_WORKERS);
    getsockname(listener, (void *)&address, &length);
    port = address.sin_port;
}

static void tune(int fd) {
    int one = 1;
    if (!is_unix) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    char *asked = getenv("SOCKBUF");
    if (asked) {
        int bytes = atoi(asked);
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
    }
}

static int connect_to_listener(void) {
    int fd = socket(is_unix ? AF_UNIX : AF_INET, SOCK_STREAM, 0);
    tune(fd);
    if (is_unix) {
        struct sockaddr_un address = unix_address();
        if (connect(fd, (void *)&address, sizeof address)) _exit(2);
    } else {
        struct sockaddr_in address = {
            .sin_family = AF_INET, .sin_port = port, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        if (connect(fd, (void *)&address, sizeof address)) _exit(2);
    }
    return fd;
}

static int accept_one(void) {
    int fd = accept(listener, 0, 0);
    tune(fd);
    return fd;
}

// ---------------------------------------------------------------------------------------------- stream and ping

// Through a ring of 8 chunks in shared memory: what a copy in and a copy out allow.
static int stream_shm(size_t chunk) {
    enum { SLOTS = 8, HEADER = 4096 };
    struct ring {
        _Atomic size_t written, read;
    };
    size_t num_chunks = ((size_t)16 << 30) / chunk, total = (size_t)16 << 30;
    char *shared = mmap(0, HEADER + chunk * SLOTS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset(shared, 1, HEADER + chunk * SLOTS);
    struct ring *ring = (void *)shared;
    ring->written = ring->read = 0;
    size_t length = 100000000 / chunk * chunk; // larger than any cache
    if (length < chunk) length = chunk;
    char *memory = malloc(length);
    memset(memory, 2, length);

    double start = now();
    int reader = fork();
    if (!reader) {
        for (size_t i = 0; i < num_chunks; i++) {
            while (ring->written <= i) __builtin_ia32_pause();
            memcpy(memory + (i * chunk) % length, shared + HEADER + (i % SLOTS) * chunk, chunk);
            ring->read = i + 1;
        }
        _exit(0);
    }
    for (size_t i = 0; i < num_chunks; i++) {
        while (i - ring->read >= SLOTS) __builtin_ia32_pause();
        memcpy(shared + HEADER + (i % SLOTS) * chunk, memory + (i * chunk) % length, chunk);
        ring->written = i + 1;
    }
    waitpid(reader, 0, 0);
    double seconds = now() - start;
    printf("{\"system\":\"limit:stream:shm\",\"chunk\":%zu,\"gb_per_s\":%.3f}\n", chunk, total / seconds / 1e9);
    return 0;
}

static int stream(const char *transport, size_t chunk) {
    size_t length = 100000000;
    char *memory = malloc(length);
    memset(memory, 1, length);
    int sender = fork();
    if (!sender) {
        int fd = connect_to_listener();
        double start = now();
        while (now() - start < 3) send_all(fd, memory, length, chunk);
        _exit(0);
    }
    int fd = accept_one();
    size_t total = 0, at = 0;
    double start = now(), cpu = cpu_seconds(RUSAGE_SELF);
    ssize_t got;
    while ((got = recv(fd, memory + at, chunk < length - at ? chunk : length - at, 0)) > 0) {
        total += got;
        at += got;
        if (at >= length) at = 0;
    }
    double seconds = now() - start;
    cpu = cpu_seconds(RUSAGE_SELF) - cpu;
    waitpid(sender, 0, 0);
    double gb = total / 1e9;
    printf("{\"system\":\"limit:stream:%s\",\"chunk\":%zu,\"gb_per_s\":%.3f,\"recv_cpu_s_per_gb\":%.3f,"
           "\"send_cpu_s_per_gb\":%.3f}\n",
           transport, chunk, gb / seconds, cpu / gb, cpu_seconds(RUSAGE_CHILDREN) / gb);
    return 0;
}

static int ping(const char *transport, size_t bytes) {
    enum { ROUND_TRIPS = 50000 };
    char *message = calloc(1, bytes);
    int echo = fork();
    if (!echo) {
        int fd = accept_one();
        while (!receive_all(fd, message, bytes, bytes)) send_all(fd, message, bytes, bytes);
        _exit(0);
    }
    int fd = connect_to_listener();
    double *us = malloc(ROUND_TRIPS * sizeof *us);
    for (int i = 0; i < ROUND_TRIPS; i++) {
        double start = now();
        send_all(fd, message, bytes, bytes);
        receive_all(fd, message, bytes, bytes);
        us[i] = (now() - start) * 1e6;
    }
    close(fd);
    waitpid(echo, 0, 0);
    qsort(us, ROUND_TRIPS, sizeof *us, by_value);
    double median = us[ROUND_TRIPS / 2];
    printf("{\"system\":\"limit:ping:%s\",\"bytes\":%zu,\"p50_us\":%.1f,\"p99_us\":%.1f,\"min_us\":%.1f,"
           "\"rt_per_s\":%.0f}\n",
           transport, bytes, median, us[ROUND_TRIPS * 99 / 100], us[0], 1e6 / median);
    return 0;
}

// ---------------------------------------------------------------------------------------------- the reference

static size_t num_params;
static int num_workers, pipelined;
static double seconds_to_run;
static float *params;

struct results { // in memory that all processes share
    atomic_int ready, go;
    double start, server_cpu, server_peak_mb;
    int count[MAX_WORKERS];
    double latency_ms[MAX_WORKERS][MAX_LATENCIES];
    double end[MAX_WORKERS];
};

static void apply(float *restrict p, const float *restrict g, size_t n) {
    for (size_t i = 0; i < n; i++) p[i] -= LEARNING_RATE * g[i];
}

static void *serve_connection(void *argument) {
    int fd = (int)(long)argument;
    size_t bytes = num_params * 4;
    if (!pipelined) {
        float *gradient = malloc(bytes);
        while (!receive_all(fd, gradient, bytes, MIB)) {
            apply(params, gradient, num_params);
            send_all(fd, params, bytes, MIB);
        }
        free(gradient);
        return 0;
    }
    float *gradient = aligned_alloc(64, SERVER_CHUNK);
    for (;;) {
        for (size_t at = 0; at < bytes; at += SERVER_CHUNK) {
            size_t chunk = bytes - at < SERVER_CHUNK ? bytes - at : SERVER_CHUNK;
            if (receive_all(fd, gradient, chunk, chunk)) return 0;
            apply(params + at / 4, gradient, chunk / 4);
            send_all(fd, params + at / 4, chunk, chunk);
        }
    }
}

static void server(struct results *results) {
    size_t bytes = (num_params * 4 + 63) / 64 * 64;
    params = aligned_alloc(64, bytes);
    for (size_t i = 0; i < num_params; i++) params[i] = 0;
    pthread_t threads[MAX_WORKERS];
    for (int i = 0; i < num_workers; i++) {
        int fd = accept_one();
        pthread_create(threads + i, 0, serve_connection, (void *)(long)fd);
    }
    while (!results->go) usleep(200);
    double cpu = cpu_seconds(RUSAGE_SELF);
    for (int i = 0; i < num_workers; i++) pthread_join(threads[i], 0);
    results->server_cpu = cpu_seconds(RUSAGE_SELF) - cpu;
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    results->server_peak_mb = usage.ru_maxrss * 1024 / 1e6;
    _exit(0);
}

static void round_trip(int fd, const float *gradient, float *pulled, size_t bytes) {
    send_all(fd, gradient, bytes, MIB);
    if (receive_all(fd, pulled, bytes, MIB)) _exit(3);
}

// On a socket that does not block: sends and receives in turn, and waits only when neither can go on.
static void pipelined_round_trip(int fd, const float *gradient, float *pulled, size_t bytes) {
    size_t sent = 0, received = 0;
    while (received < bytes) {
        int progress = 0;
        if (sent < bytes && sent - received < CLIENT_WINDOW) {
            size_t chunk = bytes - sent < CLIENT_CHUNK ? bytes - sent : CLIENT_CHUNK;
            ssize_t n = send(fd, (const char *)gradient + sent, chunk, MSG_NOSIGNAL);
            if (n > 0) {
                sent += n;
                progress = 1;
            }
        }
        size_t chunk = bytes - received < CLIENT_CHUNK ? bytes - received : CLIENT_CHUNK;
        ssize_t n = recv(fd, (char *)pulled + received, chunk, 0);
        if (n == 0) _exit(3);
        if (n > 0) {
            received += n;
            progress = 1;
        }
        if (!progress) {
            int may_send = sent < bytes && sent - received < CLIENT_WINDOW;
            struct pollfd wanted = {fd, (short)(POLLIN | (may_send ? POLLOUT : 0)), 0};
            poll(&wanted, 1, 1000);
        }
    }
}

static void worker(int id, struct results *results) {
    int fd = connect_to_listener();
    size_t bytes = num_params * 4;
    float *gradient = malloc(bytes), *pulled = malloc(bytes);
    memset(pulled, 0, bytes);
    for (size_t i = 0; i < num_params; i++) gradient[i] = 1;
    if (pipelined) fcntl(fd, F_SETFL, O_NONBLOCK);

    int count = 0, warm_ups = 0, is_warm = 0;
    for (;;) {
        double start = now();
        if (is_warm && start - results->start >= seconds_to_run) break;
        if (pipelined)
            pipelined_round_trip(fd, gradient, pulled, bytes);
        else
            round_trip(fd, gradient, pulled, bytes);
        double end = now();
        if (!is_warm) {
            if (++warm_ups == NUM_WARM_UPS) {
                is_warm = 1;
                results->ready++;
                while (!results->go) usleep(200);
            }
            continue;
        }
        if (count < MAX_LATENCIES) results->latency_ms[id][count] = (end - start) * 1e3;
        count++;
        results->end[id] = end;
    }
    results->count[id] = count;
    _exit(0);
}

static int parameter_server(const char *transport) {
    struct results *results =
        mmap(0, sizeof *results, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int server_pid = fork(), worker_pids[MAX_WORKERS];
    if (!server_pid) server(results);
    for (int i = 0; i < num_workers; i++) {
        worker_pids[i] = fork();
        if (!worker_pids[i]) worker(i, results);
    }
    while (results->ready < num_workers) usleep(500);
    results->start = now();
    results->go = 1;
    for (int i = 0; i < num_workers; i++) waitpid(worker_pids[i], 0, 0);
    waitpid(server_pid, 0, 0);

    double updates_per_s = 0;
    int total = 0, kept = 0;
    static double latency_ms[MAX_WORKERS * MAX_LATENCIES];
    for (int i = 0; i < num_workers; i++) {
        updates_per_s += results->count[i] / (results->end[i] - results->start);
        total += results->count[i];
        for (int k = 0; k < results->count[i] && k < MAX_LATENCIES; k++)
            latency_ms[kept++] = results->latency_ms[i][k];
    }
    qsort(latency_ms, kept, sizeof *latency_ms, by_value);
    double gb = num_params * 8 / 1e9; // both directions of one update
    printf("{\"system\":\"ideal_c:%s:%s\",\"n_params\":%zu,\"workers\":%d,\"updates_per_s\":%.2f,"
           "\"gb_per_s\":%.3f,\"p50_ms\":%.4f,\"p99_ms\":%.4f,\"samples\":%d,\"server_cpu_s_per_gb\":%.4f,"
           "\"server_peak_mb\":%.0f}\n",
           transport, pipelined ? "pipelined" : "sequential", num_params, num_workers, updates_per_s,
           updates_per_s * gb, latency_ms[kept / 2], latency_ms[(int)(kept * 0.99)], total,
           results->server_cpu / (total * gb), results->server_peak_mb);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: sock stream|ping|ps tcp|unix|shm …; see the head of sock.c\n");
        return 1;
    }
    const char *what = argv[1], *transport = argv[2];
    signal(SIGPIPE, SIG_IGN);
    is_unix = !strcmp(transport, "unix");
    if (!strcmp(what, "stream") && !strcmp(transport, "shm")) return stream_shm(atol(argv[3]));
    start_listening();
    if (!strcmp(what, "stream")) return stream(transport, atol(argv[3]));
    if (!strcmp(what, "ping")) return ping(transport, atol(argv[3]));
    if (!strcmp(what, "ps") && argc == 7) {
        num_params = atol(argv[3]);
        num_workers = atoi(argv[4]);
        pipelined = atoi(argv[5]);
        seconds_to_run = atof(argv[6]);
        if (num_workers < 1 || num_workers > MAX_WORKERS) return 1;
        return parameter_server(transport);
    }
    return 1;
}
