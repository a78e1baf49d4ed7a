/* A stand-in for the driver's NVML.

   As it is: two GPUs, of which process 4242 holds 12 GiB of the second; NVML_SICK lets it refuse to start.
   With NVML_SCRIPT, a file that is read anew at every call, all GPUs are idle but for what its lines say:

     devices N                      so many GPUs; otherwise two
     gone CODE                      every call returns CODE
     missing FUNCTION               that one is not supported
     used GPU MIB                   memory in use; otherwise 300 MiB
     rise GPU MIB_PER_S SINCE_S     more of it from then on, in seconds of CLOCK_MONOTONIC
     process GPU PID MIB            somebody computes there
     drawing GPU PID MIB            somebody draws there
     reasons GPU BITS               why its clocks are low
     power GPU MILLIWATTS           otherwise 70 W, and energy follows from it

   Built with OLD_DRIVER it lacks what drivers before CUDA 11 lack. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_t;

enum { SUCCESS = 0, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, MAX_DEVICES = 8 };
static int devices[MAX_DEVICES];

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

/* The n-th line of the script that has this word and, unless it is negative, this GPU; its numbers go to a, b. */
static int find(const char *word, int gpu, int n, double *a, double *b)
{
    const char *path = getenv("NVML_SCRIPT");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[200], first[60];
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file)) {
        double x = 0, y = 0, z = 0;
        int fields = sscanf(line, "%59s %lf %lf %lf", first, &x, &y, &z);
        if (fields < 1 || strcmp(first, word) || (gpu >= 0 && (int)x != gpu) || n-- > 0) continue;
        found = 1;
        *a = gpu >= 0 ? y : x;
        *b = gpu >= 0 ? z : y;
    }
    if (file) fclose(file);
    return found;
}

static int is_missing(const char *function)
{
    const char *path = getenv("NVML_SCRIPT");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[200], name[100];
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file))
        found = sscanf(line, "missing %99s", name) == 1 && !strcmp(name, function);
    if (file) fclose(file);
    return found;
}

static int status(const char *function)
{
    double code, unused;
    if (find("gone", -1, 0, &code, &unused)) return (int)code;
    return is_missing(function) ? NOT_SUPPORTED : SUCCESS;
}

#define ANSWER_OR_FAIL do { int code = status(__func__); if (code) return code; } while (0)

static int index_of(void *device) { return (int)((int *)device - devices); }
static int is_scripted(void) { return getenv("NVML_SCRIPT") != NULL; }

static double value_of(const char *word, void *device, double otherwise)
{
    double value, unused;
    return find(word, index_of(device), 0, &value, &unused) ? value : otherwise;
}

int nvmlInitWithFlags(unsigned flags)
{
    ANSWER_OR_FAIL;
    return getenv("NVML_SICK") ? DRIVER_NOT_LOADED : SUCCESS;
}

int nvmlShutdown(void) { return status(__func__); }
const char *nvmlErrorString(int code)
{
    return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : code == 15 ? "GPU is lost" : "error";
}
int nvmlSystemGetDriverVersion(char *text, unsigned n) { ANSWER_OR_FAIL; strncpy(text, "550.54.15", n); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { ANSWER_OR_FAIL; *version = 12040; return SUCCESS; }
int nvmlDeviceGetName(void *device, char *text, unsigned n) { ANSWER_OR_FAIL; strncpy(text, "Tesla V100-SXM2-16GB", n); return SUCCESS; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { ANSWER_OR_FAIL; *major = 7; *minor = 0; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { ANSWER_OR_FAIL; *device = &devices[index]; return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count)
{
    double number, unused;
    ANSWER_OR_FAIL;
    *count = find("devices", -1, 0, &number, &unused) ? (unsigned)number : 2;
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned n)
{
    int index = index_of(device);
    ANSWER_OR_FAIL;
    snprintf(text, n, "GPU-%c%d%c%c", 'a' + index, index, 'a' + index, 'a' + index);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory)
{
    double mib_per_s, since;
    double used = !is_scripted() && index_of(device) == 1 ? 12 << 10 : value_of("used", device, 300);
    ANSWER_OR_FAIL;
    if (find("rise", index_of(device), 0, &mib_per_s, &since) && now() > since) used += mib_per_s * (now() - since);
    memory->total = 16ULL << 30;
    memory->used = (unsigned long long)(used * (1 << 20));
    if (memory->used > memory->total) memory->used = memory->total;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

static int list(const char *word, void *device, unsigned *count, process_t *processes)
{
    double pid, mib;
    unsigned n = 0;
    while (find(word, index_of(device), (int)n, &pid, &mib)) {
        if (processes && n < *count) {
            memset(&processes[n], 0, sizeof *processes);
            processes[n].pid = (unsigned)pid;
            processes[n].used = mib < 0 ? ~0ULL : (unsigned long long)mib << 20;  /* ~0 is "not available" */
        }
        n++;
    }
    if (!is_scripted() && !strcmp(word, "process") && index_of(device) == 1) {
        if (processes) processes[0] = (process_t){4242, 12ULL << 30, 0, 0};
        n = 1;
    }
    int fits = processes ? n <= *count : n == 0;
    *count = n;
    return fits ? SUCCESS : INSUFFICIENT_SIZE;
}

#ifdef OLD_DRIVER
#define NEWEST(name) name##_v2
#define REASONS nvmlDeviceGetCurrentClocksThrottleReasons
#else
#define NEWEST(name) name##_v3
#define REASONS nvmlDeviceGetCurrentClocksEventReasons
#endif

int NEWEST(nvmlDeviceGetComputeRunningProcesses)(void *device, unsigned *count, process_t *processes)
{
    ANSWER_OR_FAIL;
    return list("process", device, count, processes);
}

int NEWEST(nvmlDeviceGetGraphicsRunningProcesses)(void *device, unsigned *count, process_t *processes)
{
    ANSWER_OR_FAIL;
    return list("drawing", device, count, processes);
}

int REASONS(void *device, unsigned long long *reasons)
{
    ANSWER_OR_FAIL;
    *reasons = (unsigned long long)value_of("reasons", device, 0);
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts)
{
    ANSWER_OR_FAIL;
    *milliwatts = (unsigned)value_of("power", device, 70000);
    return SUCCESS;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules)
{
    ANSWER_OR_FAIL;
    *millijoules = (unsigned long long)(value_of("power", device, 70000) * now());
    return SUCCESS;
}
#endif
