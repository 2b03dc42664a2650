/*
 * A stand-in for NVIDIA's management library, for machines without a GPU.
 *
 * What it answers lies in a file ($CONSERVE_STANDIN_NVML) that every process maps, so that several
 * see the same GPUs and a test can move time, power and faults. Layout: tests/nvml/standin.py.
 * A GPU draws what its load asks for, but no more than its limit; its energy counter is the
 * integral of that.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define GPUS 8
#define PROCESSES 8

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, DENIED = 4, NOT_FOUND = 6,
       TOO_SMALL = 7, NO_LIBRARY = 12, LOST = 15 };

/* What a GPU can be told not to support: bits of `unsupported`. */
enum { NO_ENERGY = 1, NO_MIG = 2, NO_CORES = 4, NO_POWER = 8, NO_UTILISATION = 16 };

typedef struct {
    char name[96];
    char uuid[96];
    int64_t load_mw, limit_mw, default_mw, min_mw, max_mw;
    int64_t energy_uj, settled_us;
    int64_t memory_bytes, used_bytes, cores, major, minor, utilisation, temperature;
    int64_t mig_enabled, mig_devices, mig_sms;
    int64_t lost, denied, unsupported, set_calls, fail_set;
    int64_t processes, pids[PROCESSES], process_bytes[PROCESSES];
} gpu_t;

typedef struct {
    int64_t count, real_time, now_us, init_error, cuda;
    char driver[32];
    gpu_t gpus[GPUS];
} state_t;

static state_t *state;
static int file = -1;

typedef struct handle *device_t;

static void lock(void) { flock(file, LOCK_EX); }
static int unlock(int code) { flock(file, LOCK_UN); return code; }

static int64_t now_us(void) {
    struct timespec now;
    if (!state->real_time) return state->now_us;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

static int64_t draw_mw(const gpu_t *gpu) {
    return gpu->load_mw < gpu->limit_mw ? gpu->load_mw : gpu->limit_mw;
}

static void settle(gpu_t *gpu) {
    int64_t now = now_us();
    gpu->energy_uj += draw_mw(gpu) * (now - gpu->settled_us) / 1000;
    gpu->settled_us = now;
}

/* A handle is 1000 * (GPU + 1), plus MIG device + 1. */
static gpu_t *find(device_t device, int *mig) {
    intptr_t number = (intptr_t)device;
    if (number < 1000 || number / 1000 > state->count) return NULL;
    if (mig) *mig = (int)(number % 1000) - 1;
    return &state->gpus[number / 1000 - 1];
}

#define OPEN_GPU(device)                                                                          \
    if (!state) return UNINITIALIZED;                                                             \
    int mig = -1;                                                                                 \
    gpu_t *gpu = find(device, &mig);                                                              \
    if (!gpu) return INVALID;                                                                     \
    lock();                                                                                       \
    if (gpu->lost) return unlock(LOST);

#define REFUSE_IF(bit) if (gpu->unsupported & (bit)) return unlock(UNSUPPORTED);

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    const char *path = getenv("CONSERVE_STANDIN_NVML");
    if (!path) return NO_LIBRARY;
    if (state) { munmap(state, sizeof *state); close(file); state = NULL; }
    file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return NO_LIBRARY;
    state_t *mapped = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) return NO_LIBRARY;
    state = mapped;
    return (int)state->init_error;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return state ? OK : UNINITIALIZED; }

const char *nvmlErrorString(int code) {
    static char text[32];
    snprintf(text, sizeof text, "stand-in error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    if (!state) return UNINITIALIZED;
    return snprintf(text, length, "%s", state->driver) < (int)length ? OK : TOO_SMALL;
}
int nvmlSystemGetNVMLVersion(char *text, unsigned length) {
    if (!state) return UNINITIALIZED;
    return snprintf(text, length, "12.%s", state->driver) < (int)length ? OK : TOO_SMALL;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    if (!state) return UNINITIALIZED;
    *version = (int)state->cuda;
    return OK;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!state) return UNINITIALIZED;
    *count = (unsigned)state->count;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) {
    if (!state) return UNINITIALIZED;
    if ((int64_t)index >= state->count) return INVALID;
    *device = (device_t)(intptr_t)(1000 * (index + 1));
    return OK;
}

static int mig_uuid(const gpu_t *gpu, int index, char *text, unsigned length) {
    return snprintf(text, length, "MIG-%d-%s", index, gpu->uuid) < (int)length ? OK : TOO_SMALL;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *device) {
    if (!state) return UNINITIALIZED;
    for (int index = 0; index < state->count; index++) {
        const gpu_t *gpu = &state->gpus[index];
        char part[128];
        if (!strcmp(gpu->uuid, uuid)) {
            if (gpu->lost) return LOST;
            *device = (device_t)(intptr_t)(1000 * (index + 1));
            return OK;
        }
        for (int mig = 0; gpu->mig_enabled && mig < gpu->mig_devices; mig++) {
            mig_uuid(gpu, mig, part, sizeof part);
            if (!strcmp(part, uuid)) {
                *device = (device_t)(intptr_t)(1000 * (index + 1) + mig + 1);
                return OK;
            }
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetName(device_t device, char *text, unsigned length) {
    OPEN_GPU(device)
    snprintf(text, length, mig < 0 ? "%s" : "%s MIG", gpu->name);
    return unlock(OK);
}
int nvmlDeviceGetUUID(device_t device, char *text, unsigned length) {
    OPEN_GPU(device)
    if (mig >= 0) return unlock(mig_uuid(gpu, mig, text, length));
    snprintf(text, length, "%s", gpu->uuid);
    return unlock(OK);
}
int nvmlDeviceGetMemoryInfo(device_t device, unsigned long long *info) {
    OPEN_GPU(device)
    unsigned long long total = (unsigned long long)gpu->memory_bytes;
    if (mig >= 0) total /= (unsigned long long)gpu->mig_devices;
    info[0] = total;
    info[2] = (unsigned long long)gpu->used_bytes;
    info[1] = total - info[2];
    return unlock(OK);
}
int nvmlDeviceGetCudaComputeCapability(device_t device, int *major, int *minor) {
    OPEN_GPU(device)
    *major = (int)gpu->major;
    *minor = (int)gpu->minor;
    return unlock(OK);
}
int nvmlDeviceGetNumGpuCores(device_t device, unsigned *cores) {
    OPEN_GPU(device)
    REFUSE_IF(NO_CORES)
    *cores = (unsigned)gpu->cores;
    return unlock(OK);
}

int nvmlDeviceGetPowerUsage(device_t device, unsigned *milliwatts) {
    OPEN_GPU(device)
    if (mig >= 0) return unlock(UNSUPPORTED);
    REFUSE_IF(NO_POWER)
    *milliwatts = (unsigned)draw_mw(gpu);
    return unlock(OK);
}
int nvmlDeviceGetPowerManagementLimit(device_t device, unsigned *milliwatts) {
    OPEN_GPU(device)
    if (mig >= 0) return unlock(UNSUPPORTED);
    REFUSE_IF(NO_POWER)
    *milliwatts = (unsigned)gpu->limit_mw;
    return unlock(OK);
}
int nvmlDeviceGetPowerManagementDefaultLimit(device_t device, unsigned *milliwatts) {
    OPEN_GPU(device)
    REFUSE_IF(NO_POWER)
    *milliwatts = (unsigned)gpu->default_mw;
    return unlock(OK);
}
int nvmlDeviceGetPowerManagementLimitConstraints(device_t device, unsigned *low, unsigned *high) {
    OPEN_GPU(device)
    if (mig >= 0) return unlock(UNSUPPORTED);
    REFUSE_IF(NO_POWER)
    *low = (unsigned)gpu->min_mw;
    *high = (unsigned)gpu->max_mw;
    return unlock(OK);
}
int nvmlDeviceSetPowerManagementLimit(device_t device, unsigned milliwatts) {
    OPEN_GPU(device)
    if (mig >= 0) return unlock(UNSUPPORTED);
    gpu->set_calls++;
    REFUSE_IF(NO_POWER)
    if (gpu->denied) return unlock(DENIED);
    if (gpu->fail_set) return unlock((int)gpu->fail_set);
    if (milliwatts < gpu->min_mw || milliwatts > gpu->max_mw) return unlock(INVALID);
    settle(gpu);
    gpu->limit_mw = milliwatts;
    return unlock(OK);
}
int nvmlDeviceGetTotalEnergyConsumption(device_t device, unsigned long long *millijoules) {
    OPEN_GPU(device)
    if (mig >= 0) return unlock(UNSUPPORTED);
    REFUSE_IF(NO_ENERGY)
    settle(gpu);
    *millijoules = (unsigned long long)(gpu->energy_uj / 1000);
    return unlock(OK);
}
int nvmlDeviceGetUtilizationRates(device_t device, unsigned *rates) {
    OPEN_GPU(device)
    REFUSE_IF(NO_UTILISATION)
    if (gpu->mig_enabled) return unlock(UNSUPPORTED);
    rates[0] = (unsigned)gpu->utilisation;
    rates[1] = 0;
    return unlock(OK);
}
int nvmlDeviceGetTemperature(device_t device, int sensor, unsigned *celsius) {
    (void)sensor;
    OPEN_GPU(device)
    *celsius = (unsigned)gpu->temperature;
    return unlock(OK);
}

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} process_t;

int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *count, process_t *list) {
    OPEN_GPU(device)
    unsigned room = *count;
    *count = (unsigned)gpu->processes;
    if (room < *count) return unlock(TOO_SMALL);
    for (unsigned index = 0; index < *count; index++) {
        list[index].pid = (unsigned)gpu->pids[index];
        list[index].memory = (unsigned long long)gpu->process_bytes[index];
        list[index].gpu_instance = list[index].compute_instance = 0xFFFFFFFFu;
    }
    return unlock(OK);
}

int nvmlDeviceGetMigMode(device_t device, unsigned *current, unsigned *pending) {
    OPEN_GPU(device)
    REFUSE_IF(NO_MIG)
    *current = *pending = (unsigned)gpu->mig_enabled;
    return unlock(OK);
}
int nvmlDeviceGetMaxMigDeviceCount(device_t device, unsigned *count) {
    OPEN_GPU(device)
    *count = 7;
    return unlock(OK);
}
int nvmlDeviceGetMigDeviceHandleByIndex(device_t device, unsigned index, device_t *part) {
    OPEN_GPU(device)
    if ((int64_t)index >= gpu->mig_devices) return unlock(NOT_FOUND);
    *part = (device_t)((intptr_t)device + index + 1);
    return unlock(OK);
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device_t device, device_t *parent) {
    OPEN_GPU(device)
    if (mig < 0) return unlock(INVALID);
    *parent = (device_t)((intptr_t)device / 1000 * 1000);
    return unlock(OK);
}

typedef struct {
    unsigned sms, copies, decoders, encoders, jpegs, ofas, gpu_slices, compute_slices;
    unsigned long long memory_mb;
} attributes_t;

int nvmlDeviceGetAttributes_v2(device_t device, attributes_t *attributes) {
    OPEN_GPU(device)
    if (mig < 0) return unlock(UNSUPPORTED);
    memset(attributes, 0, sizeof *attributes);
    attributes->sms = (unsigned)gpu->mig_sms;
    attributes->memory_mb = (unsigned long long)(gpu->memory_bytes / gpu->mig_devices) >> 20;
    return unlock(OK);
}
