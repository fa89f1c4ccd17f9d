/* Writes a line for every call by which a program waits for its GPU, or copies: put before the CUDA runtime with
 * LD_PRELOAD. It sees what calls the shared libcudart, as PyTorch does, from whatever thread and library.
 *
 * A line: CLOCK_MONOTONIC in seconds, the function's name. Where the file cannot be written, nothing is.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int file = -1;
static pthread_once_t opened = PTHREAD_ONCE_INIT;

static void open_file(void) {
  const char *path = getenv("SYNCS_FILE");
  if (path) file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
}

static void note(const char *name) {
  char line[96];
  struct timespec now;
  pthread_once(&opened, open_file);
  if (file < 0) return;
  clock_gettime(CLOCK_MONOTONIC, &now);
  int length = snprintf(line, sizeof line, "%lld.%09ld %s\n", (long long)now.tv_sec, now.tv_nsec, name);
  if (length > 0 && write(file, line, length) != length) return;
}

/* The runtime may have been loaded where RTLD_NEXT does not look: then it is found among all that is loaded. */
static int find(struct dl_phdr_info *info, size_t size, void *found) {
  (void)size;
  if (!info->dlpi_name || !strstr(info->dlpi_name, "libcudart.so")) return 0;
  *(void **)found = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
  return *(void **)found != NULL;
}

static void *real(const char *name) {
  void *function = dlsym(RTLD_NEXT, name);
  void *library = NULL;
  if (!function && dl_iterate_phdr(find, &library) && library) function = dlsym(library, name);
  if (!function) {
    fprintf(stderr, "syncs: %s is in no libcudart.so that is loaded\n", name);
    abort();
  }
  return function;
}

#define WATCH(name, parameters, arguments)                  \
  int name parameters {                                     \
    static int(*call) parameters;                           \
    if (!call) call = (int(*) parameters)real(#name);       \
    note(#name);                                            \
    return call arguments;                                  \
  }

/* cuda_runtime_api.h; handles are pointers and enumerations ints. */
WATCH(cudaDeviceSynchronize, (void), ())
WATCH(cudaStreamSynchronize, (void *stream), (stream))
WATCH(cudaEventSynchronize, (void *event), (event))
WATCH(cudaMemcpy, (void *to, const void *from, size_t bytes, int kind), (to, from, bytes, kind))
WATCH(cudaMemcpyAsync, (void *to, const void *from, size_t bytes, int kind, void *stream), (to, from, bytes, kind, stream))
WATCH(cudaMemset, (void *at, int value, size_t bytes), (at, value, bytes))
WATCH(cudaMalloc, (void **at, size_t bytes), (at, bytes))
WATCH(cudaFree, (void *at), (at))
