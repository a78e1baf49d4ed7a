/* A stand-in for the driver's NVML.

   As it is: two GPUs, of which process 4242 holds 12 GiB of the second; NVML_SICK lets it refuse to start, with that code.
   With NVML_SCRIPT, a file that is read anew at every call, all GPUs are idle but for what its lines say:

     devices N                      so many GPUs; otherwise two
     gone CODE                      every call returns CODE
     lost GPU CODE                  that one returns CODE, whatever it is asked, its handle too
     mig GPU N MIB                  it is divided into N instances of so much memory
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

enum { SUCCESS = 0, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, NOT_FOUND = 6, MAX_DEVICES = 8, MAX_INSTANCES = 7 };
static int devices[MAX_DEVICES], instances[MAX_DEVICES][MAX_INSTANCES];

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

/* Of the GPU, also of an instance's. */
static int index_of(void *device)
{
    long n = (int *)device - &instances[0][0];
    return n >= 0 && n < MAX_DEVICES * MAX_INSTANCES ? (int)(n / MAX_INSTANCES) : (int)((int *)device - devices);
}

/* -1 for a whole GPU. */
static int instance_of(void *device)
{
    long n = (int *)device - &instances[0][0];
    return n >= 0 && n < MAX_DEVICES * MAX_INSTANCES ? (int)(n % MAX_INSTANCES) : -1;
}

static int n_instances(int index, double *mib)
{
    double n;
    return find("mig", index, 0, &n, mib) ? (int)n : 0;
}

static int status_of(const char *function, int index)
{
    double code, unused;
    int failed = status(function);
    return !failed && find("lost", index, 0, &code, &unused) ? (int)code : failed;
}

#define ANSWER_OR_FAIL_OF(device) do { int code = status_of(__func__, index_of(device)); if (code) return code; } while (0)
#define ONLY_WHOLE(device) do { if (instance_of(device) >= 0) return NOT_SUPPORTED; } while (0)

static int is_scripted(void) { return getenv("NVML_SCRIPT") != NULL; }

static double value_of(const char *word, void *device, double otherwise)
{
    double value, unused;
    return find(word, index_of(device), 0, &value, &unused) ? value : otherwise;
}

int nvmlInitWithFlags(unsigned flags)
{
    ANSWER_OR_FAIL;
    return getenv("NVML_SICK") ? atoi(getenv("NVML_SICK")) : SUCCESS;
}

int nvmlShutdown(void) { return status(__func__); }
const char *nvmlErrorString(int code) { return "error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned n) { ANSWER_OR_FAIL; strncpy(text, "550.54.15", n); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { ANSWER_OR_FAIL; *version = 12040; return SUCCESS; }

int nvmlDeviceGetName(void *device, char *text, unsigned n)
{
    ANSWER_OR_FAIL_OF(device);
    strncpy(text, instance_of(device) < 0 ? "Tesla V100-SXM2-16GB" : "Tesla V100-SXM2-16GB MIG 1g.5gb", n);
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor)
{
    ANSWER_OR_FAIL_OF(device);
    ONLY_WHOLE(device);
    *major = 7;
    *minor = 0;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    ANSWER_OR_FAIL_OF(&devices[index]);
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending)
{
    double mib;
    ANSWER_OR_FAIL_OF(device);
    *current = *pending = find("mig", index_of(device), 0, &mib, &mib) ? 1 : 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) { ANSWER_OR_FAIL_OF(device); *count = MAX_INSTANCES; return SUCCESS; }

/* The first number is left free, as it is once the first of several instances was taken away. */
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned number, void **instance)
{
    double mib;
    ANSWER_OR_FAIL_OF(device);
    if (number < 1 || (int)number > n_instances(index_of(device), &mib)) return NOT_FOUND;
    *instance = &instances[index_of(device)][number];
    return SUCCESS;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *instance, void **device)
{
    ANSWER_OR_FAIL_OF(instance);
    *device = &devices[index_of(instance)];
    return SUCCESS;
}

int nvmlDeviceGetIndex(void *device, unsigned *index) { ANSWER_OR_FAIL_OF(device); *index = index_of(device); return SUCCESS; }

/* Of instances: MIG-, then the GPU's letter and number, then their own, as in MIG-a0-1. */
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    double mib;
    char letter;
    int index, number;
    ANSWER_OR_FAIL;
    if (sscanf(uuid, "MIG-%c%d-%d", &letter, &index, &number) != 3 || number < 1 || number > n_instances(index, &mib)) return NOT_FOUND;
    ANSWER_OR_FAIL_OF(&devices[index]);
    *device = &instances[index][number];
    return SUCCESS;
}

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
    ANSWER_OR_FAIL_OF(device);
    if (instance_of(device) >= 0) snprintf(text, n, "MIG-%c%d-%d", 'a' + index, index, instance_of(device));
    else snprintf(text, n, "GPU-%c%d%c%c", 'a' + index, index, 'a' + index, 'a' + index);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory)
{
    double mib_per_s, since, mib;
    double used = !is_scripted() && index_of(device) == 1 ? 12 << 10 : value_of("used", device, 300);
    ANSWER_OR_FAIL_OF(device);
    if (find("rise", index_of(device), 0, &mib_per_s, &since) && now() > since) used += mib_per_s * (now() - since);
    memory->total = 16ULL << 30;
    if (instance_of(device) >= 0 && n_instances(index_of(device), &mib)) memory->total = (unsigned long long)mib << 20;
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
    ANSWER_OR_FAIL_OF(device);
    return list("process", device, count, processes);
}

int NEWEST(nvmlDeviceGetGraphicsRunningProcesses)(void *device, unsigned *count, process_t *processes)
{
    ANSWER_OR_FAIL_OF(device);
    return list("drawing", device, count, processes);
}

int REASONS(void *device, unsigned long long *reasons)
{
    ANSWER_OR_FAIL_OF(device);
    ONLY_WHOLE(device);
    *reasons = (unsigned long long)value_of("reasons", device, 0);
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts)
{
    ANSWER_OR_FAIL_OF(device);
    ONLY_WHOLE(device);
    *milliwatts = (unsigned)value_of("power", device, 70000);
    return SUCCESS;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules)
{
    ANSWER_OR_FAIL_OF(device);
    ONLY_WHOLE(device);
    *millijoules = (unsigned long long)(value_of("power", device, 70000) * now());
    return SUCCESS;
}
#endif
