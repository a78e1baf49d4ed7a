/* A stand-in for the driver's NVML: two GPUs, of which the second is busy. Refuses to start when NVML_SICK is set. */
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_t;

static int devices[2];
enum { SUCCESS = 0, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };

int nvmlInitWithFlags(unsigned flags) { return getenv("NVML_SICK") ? DRIVER_NOT_LOADED : SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned n) { strncpy(text, "550.54.15", n); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12040; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = &devices[index]; return SUCCESS; }
int nvmlDeviceGetName(void *device, char *text, unsigned n) { strncpy(text, "Tesla V100-SXM2-16GB", n); return SUCCESS; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 7; *minor = 0; return SUCCESS; }

int nvmlDeviceGetUUID(void *device, char *text, unsigned n)
{
    strncpy(text, device == &devices[0] ? "GPU-a0aa" : "GPU-b1bb", n);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory)
{
    memory->total = 16ULL << 30;
    memory->used = device == &devices[0] ? 300ULL << 20 : 12ULL << 30;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *processes)
{
    if (device == &devices[0]) { *count = 0; return SUCCESS; }
    if (!processes) { *count = 1; return INSUFFICIENT_SIZE; }
    *count = 1;
    processes[0].pid = 4242;
    processes[0].used = 12ULL << 30;
    return SUCCESS;
}
