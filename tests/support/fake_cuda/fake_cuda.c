// A stand-in libcuda.so.1 for tests without a GPU. It has every driver call that oxmoe makes, with the real driver's rules, and
// records each. It is compiled against NVIDIA's cuda.h, so a wrong structure layout in the caller shows.
//
// FAKE_LOG         file that gets one JSON object for each call
// FAKE_CC          compute capability times 10 (90)
// FAKE_SMS         multiprocessors (132)
// FAKE_SHARED      most dynamic shared memory of a CTA, bytes (232448)
// FAKE_DEVICES     GPUs (1)
// FAKE_VERSION     CUDA version that the driver speaks (13000)
// FAKE_TOO_LARGE   if 1: cooperative launches are too large, as under an MPS limit
// FAKE_GREEN       if set: every stream belongs to a green context with this many multiprocessors, which hold two CTAs each
// FAKE_FAIL        "cuLaunchKernelEx:2:719": the second such call returns 719
// FAKE_CAPTURING   1: streams are being captured into a graph (0)
// FAKE_LOCATION    kind of memory that imported handles report (1: a device's)
// FAKE_PARAMETERS  "route:120,112;combine:48": sizes of the parameters of kernels whose names start so; the longest prefix counts

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

CUresult cuInit(unsigned flags) {
    ENTER();
    REQUIRE(flags == 0, CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
    ENTER();
    *version = (int)number("FAKE_VERSION", 13000);
    record("{\"call\": \"cuDriverGetVersion\"}");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
    ENTER();
    *count = (int)number("FAKE_DEVICES", 1);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    ENTER();
    REQUIRE(ordinal >= 0 && ordinal < number("FAKE_DEVICES", 1), CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
    ENTER();
    snprintf(name, (size_t)length, "Stand-in %d", device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    ENTER();
    (void)device;
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
            *value = capability() / 10;
            break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
            *value = capability() % 10;
            break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
            *value = (int)number("FAKE_SMS", 132);
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
            *value = shared_limit();
            break;
        default:
            return refuse(__func__, CUDA_ERROR_INVALID_VALUE, "an attribute that the stand-in knows");
    }
    return CUDA_SUCCESS;
}

// The primary context of device i is address 0xC000 + i.
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    ENTER();
    *context = (CUcontext)(uintptr_t)(0xC000 + device);
    record("{\"call\": \"cuDevicePrimaryCtxRetain\", \"device\": %d}", device);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
    ENTER();
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER();
    current = context;
    record("{\"call\": \"cuCtxSetCurrent\", \"context\": %llu}", (unsigned long long)(uintptr_t)context);
    return CUDA_SUCCESS;
}

// Whether the image has machine code for this GPU. An entry of a fatbin has its kind (2: cubin) at byte 0, the size of its header
// at 4, the size of its data at 8, and the architecture at 28.
static int has_code(const unsigned char* image) {
    uint16_t header;
    uint64_t size;
    memcpy(&header, image + 6, sizeof header);
    memcpy(&size, image + 8, sizeof size);
    for (const unsigned char *entry = image + header, *end = entry + size; entry < end;) {
        uint16_t kind;
        uint32_t entry_header, arch;
        uint64_t data;
        memcpy(&kind, entry, sizeof kind);
        memcpy(&entry_header, entry + 4, sizeof entry_header);
        memcpy(&data, entry + 8, sizeof data);
        memcpy(&arch, entry + 28, sizeof arch);
        if (kind == 2 && arch / 10 == (uint32_t)capability() / 10 && arch <= (uint32_t)capability()) return 1;
        entry += entry_header + data;
    }
    return 0;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    static int loaded;
    ENTER();
    REQUIRE(current, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE((uintptr_t)image % 64 == 0, CUDA_ERROR_INVALID_IMAGE);
    uint32_t magic;
    memcpy(&magic, image, sizeof magic);
    REQUIRE(magic == kFatbinMagic, CUDA_ERROR_INVALID_IMAGE);
    REQUIRE(has_code(image), CUDA_ERROR_NO_BINARY_FOR_GPU);
    *module = calloc(1, sizeof **module);
    (*module)->context = current;
    (*module)->index = loaded++;
    record("{\"call\": \"cuModuleLoadData\", \"image\": %llu}", (unsigned long long)(uintptr_t)image);
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
    ENTER();
    record("{\"call\": \"cuModuleUnload\", \"module\": %d}", module->index);
    free(module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    ENTER();
    REQUIRE(module && module->context == current, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(strlen(name) < sizeof(*function)->name, CUDA_ERROR_NOT_FOUND);
    *function = calloc(1, sizeof **function);
    strcpy((*function)->name, name);
    (*function)->context = module->context;
    (*function)->max_dynamic_shared = kDefaultShared;
    record("{\"call\": \"cuModuleGetFunction\", \"kernel\": \"%s\", \"module\": %d}", name, module->index);
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    ENTER();
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            REQUIRE(value >= 0 && value <= shared_limit(), CUDA_ERROR_INVALID_VALUE);
            function->max_dynamic_shared = value;
            break;
        case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
            REQUIRE(value >= -1 && value <= 100, CUDA_ERROR_INVALID_VALUE);
            break;
        case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
            REQUIRE(capability() >= 90, CUDA_ERROR_NOT_SUPPORTED);
            function->any_cluster_size = value;
            break;
        default:
            return refuse(__func__, CUDA_ERROR_INVALID_VALUE, "an attribute that the stand-in knows");
    }
    record("{\"call\": \"cuFuncSetAttribute\", \"kernel\": \"%s\", \"attribute\": %d, \"value\": %d}", function->name, attribute,
           value);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER();
    REQUIRE(current, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(to + bytes <= from || from + bytes <= to, CUDA_ERROR_INVALID_VALUE);
    record("{\"call\": \"cuMemcpyDtoDAsync\", \"to\": %llu, \"from\": %llu, \"bytes\": %zu, \"stream\": %llu}", to, from, bytes,
           (unsigned long long)(uintptr_t)stream);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    ENTER();
    REQUIRE(current, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(!number("FAKE_CAPTURING", 0), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    memcpy(to, (const void*)from, bytes);
    record("{\"call\": \"cuMemcpyDtoHAsync\", \"from\": %llu, \"bytes\": %zu, \"stream\": %llu}", from, bytes,
           (unsigned long long)(uintptr_t)stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    ENTER();
    REQUIRE(current, CUDA_ERROR_INVALID_CONTEXT);
    *status = number("FAKE_CAPTURING", 0) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    record("{\"call\": \"cuStreamIsCapturing\", \"stream\": %llu}", (unsigned long long)(uintptr_t)stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
    ENTER();
    REQUIRE(current, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(!number("FAKE_CAPTURING", 0), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    record("{\"call\": \"cuStreamSynchronize\", \"stream\": %llu}", (unsigned long long)(uintptr_t)stream);
    return CUDA_SUCCESS;
}

// Memory that processes share. A handle is a memfd + 1, and a mapping is a mapping of it. Sizes must be whole units.
enum { kUnit = 2 << 20 };

CUresult cuMemGetAllocationGranularity(size_t* unit, const CUmemAllocationProp* prop, CUmemAllocationGranularity_flags option) {
    ENTER();
    (void)option;
    REQUIRE(prop->type == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
    *unit = kUnit;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* prop,
                     unsigned long long flags) {
    ENTER();
    REQUIRE(current && !flags && bytes && bytes % kUnit == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(prop->type == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(prop->location.id >= 0 && prop->location.id < number("FAKE_DEVICES", 1), CUDA_ERROR_INVALID_DEVICE);
    const int fd = memfd_create("fake_cuda", MFD_CLOEXEC);
    REQUIRE(fd >= 0 && !ftruncate(fd, (off_t)bytes), CUDA_ERROR_OUT_OF_MEMORY);
    *handle = (CUmemGenericAllocationHandle)fd + 1;
    record("{\"call\": \"cuMemCreate\", \"bytes\": %zu, \"device\": %d}", bytes, prop->location.id);
    return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
    ENTER();
    REQUIRE(handle && !flags && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
    *(int*)out = dup((int)handle - 1);
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* from, CUmemAllocationHandleType type) {
    ENTER();
    REQUIRE(current && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
    const int fd = dup((int)(uintptr_t)from);
    REQUIRE(fd >= 0, CUDA_ERROR_INVALID_HANDLE);
    *handle = (CUmemGenericAllocationHandle)fd + 1;
    record("{\"call\": \"cuMemImportFromShareableHandle\"}");
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop, CUmemGenericAllocationHandle handle) {
    ENTER();
    REQUIRE(handle, CUDA_ERROR_INVALID_HANDLE);
    memset(prop, 0, sizeof *prop);
    prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop->location.type = (CUmemLocationType)number("FAKE_LOCATION", CU_MEM_LOCATION_TYPE_DEVICE);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    ENTER();
    REQUIRE(bytes && bytes % kUnit == 0 && !alignment && !wanted && !flags, CUDA_ERROR_INVALID_VALUE);
    void* at = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(at != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    *address = (CUdeviceptr)at;
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    ENTER();
    REQUIRE(handle && bytes % kUnit == 0 && !offset && !flags, CUDA_ERROR_INVALID_VALUE);
    struct stat memory;
    REQUIRE(!fstat((int)handle - 1, &memory) && (off_t)bytes <= memory.st_size, CUDA_ERROR_INVALID_VALUE);
    void* at = mmap((void*)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle - 1, 0);
    REQUIRE(at == (void*)address, CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
    ENTER();
    REQUIRE(count == 1 && access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(access->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!mprotect((void*)address, bytes, PROT_READ | PROT_WRITE), CUDA_ERROR_INVALID_VALUE);
    record("{\"call\": \"cuMemSetAccess\", \"address\": %llu, \"device\": %d}", address, access->location.id);
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER();
    REQUIRE(handle && !close((int)handle - 1), CUDA_ERROR_INVALID_HANDLE);
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    ENTER();
    void* at = mmap((void*)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    REQUIRE(at == (void*)address, CUDA_ERROR_INVALID_VALUE);
    record("{\"call\": \"cuMemUnmap\", \"address\": %llu}", address);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    ENTER();
    REQUIRE(!munmap((void*)address, bytes), CUDA_ERROR_INVALID_VALUE);
    return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
    ENTER();
    REQUIRE(current && flags == (CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP), CUDA_ERROR_INVALID_VALUE);
    *address = malloc(bytes);
    memset(*address, 0xA5, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* address) {
    ENTER();
    free(address);
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
    ENTER();
    REQUIRE(current && bytes, CUDA_ERROR_INVALID_VALUE);
    *address = (CUdeviceptr)aligned_alloc(256, (bytes + 255) / 256 * 256);
    memset((void*)*address, 0xA5, bytes);
    record("{\"call\": \"cuMemAlloc\", \"address\": %llu, \"bytes\": %zu}", *address, bytes);
    return CUDA_SUCCESS;
}

// The memset would run in stream order, so it is only recorded.
CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream) {
    ENTER();
    REQUIRE(current && bytes, CUDA_ERROR_INVALID_VALUE);
    record("{\"call\": \"cuMemsetD8Async\", \"address\": %llu, \"value\": %d, \"bytes\": %zu, \"stream\": %llu}", address, value,
           bytes, (unsigned long long)(uintptr_t)stream);
    return CUDA_SUCCESS;
}

CUresult cuMemsetD8(CUdeviceptr address, unsigned char value, size_t bytes) {
    ENTER();
    REQUIRE(current, CUDA_ERROR_INVALID_CONTEXT);
    memset((void*)address, value, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
    ENTER();
    REQUIRE(current, CUDA_ERROR_INVALID_CONTEXT);
    memcpy(to, (const void*)from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    ENTER();
    REQUIRE(current, CUDA_ERROR_INVALID_CONTEXT);
    record("{\"call\": \"cuCtxSynchronize\"}");
    return CUDA_SUCCESS;
}

static void list(char* text, size_t length, const unsigned long long* values, unsigned count) {
    size_t used = (size_t)snprintf(text, length, "[");
    for (unsigned i = 0; i < count && used < length; ++i) {
        used += (size_t)snprintf(text + used, length - used, "%s%llu", i ? ", " : "", values[i]);
    }
    if (used < length) snprintf(text + used, length - used, "]");
}

// The map's first words are its number and the tensor's address.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    static uint64_t encoded;
    ENTER();
    (void)promotion;
    REQUIRE(capability() >= 90, CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE((uintptr_t)map % 64 == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE((uintptr_t)address % 16 == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(rank >= 1 && rank <= 5, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(interleave == CU_TENSOR_MAP_INTERLEAVE_NONE, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE, CUDA_ERROR_INVALID_VALUE);
    const int bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
    REQUIRE(bytes == 1 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            CUDA_ERROR_INVALID_VALUE);
    unsigned long long values[3][5] = {{0}};
    for (cuuint32_t i = 0; i < rank; ++i) {
        REQUIRE(sizes[i] >= 1 && sizes[i] <= 1ull << 32, CUDA_ERROR_INVALID_VALUE);
        REQUIRE(box[i] >= 1 && box[i] <= 256, CUDA_ERROR_INVALID_VALUE);
        REQUIRE(steps[i] >= 1 && steps[i] <= 8, CUDA_ERROR_INVALID_VALUE);
        values[0][i] = sizes[i];
        values[1][i] = box[i];
        if (i + 1 == rank) continue;
        REQUIRE(strides[i] % 16 == 0, CUDA_ERROR_INVALID_VALUE);
        REQUIRE(strides[i] < 1ull << 40, CUDA_ERROR_INVALID_VALUE);
        values[2][i] = strides[i];
    }
    const cuuint32_t spans[] = {0, 32, 64, 128};
    REQUIRE(box[0] * bytes % 16 == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(swizzle <= CU_TENSOR_MAP_SWIZZLE_128B, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || box[0] * bytes <= spans[swizzle], CUDA_ERROR_INVALID_VALUE);
    memset(map, 0, sizeof *map);
    const uint64_t words[2] = {++encoded, (uint64_t)(uintptr_t)address};
    memcpy(map, words, sizeof words);
    char text[3][128];
    list(text[0], sizeof text[0], values[0], rank);
    list(text[1], sizeof text[1], values[1], rank);
    list(text[2], sizeof text[2], values[2], rank - 1);
    record(
        "{\"call\": \"cuTensorMapEncodeTiled\", \"map\": %llu, \"address\": %llu, \"type\": %d, \"sizes\": %s, \"box\": %s, "
        "\"strides\": %s, \"swizzle\": %d}",
        (unsigned long long)encoded, (unsigned long long)(uintptr_t)address, type, text[0], text[1], text[2], swizzle);
    return CUDA_SUCCESS;
}

// The green context of a stream has the stream's address plus one.
CUresult cuStreamGetGreenCtx(CUstream stream, CUgreenCtx* context) {
    ENTER();
    *context = number("FAKE_GREEN", 0) ? (CUgreenCtx)((uintptr_t)stream + 1) : NULL;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxGetDevResource(CUgreenCtx context, CUdevResource* resource, CUdevResourceType type) {
    ENTER();
    REQUIRE((uintptr_t)context % 2 == 1 && type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_VALUE);
    memset(resource, 0, sizeof *resource);
    resource->type = type;
    resource->sm.smCount = (unsigned)number("FAKE_GREEN", 0);
    return CUDA_SUCCESS;
}

// Reads sizes of a kernel's parameters from FAKE_PARAMETERS; returns how many there are.
static int parameter_sizes(const char* kernel, long sizes[4]) {
    const char* best = NULL;
    size_t best_length = 0;
    for (const char* at = getenv("FAKE_PARAMETERS"); at && *at;) {
        const size_t length = strcspn(at, ":");
        if (!strncmp(at, kernel, length) && length > best_length) {
            best = at + length + 1;
            best_length = length;
        }
        at = strchr(at, ';');
        if (at) ++at;
    }
    int count = 0;
    while (best && count < 4) {
        char* end;
        sizes[count++] = strtol(best, &end, 10);
        best = *end == ',' ? end + 1 : NULL;
    }
    return count;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
    ENTER();
    REQUIRE(current && function->context == current, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(!extra, CUDA_ERROR_INVALID_VALUE);
    const unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
    REQUIRE(threads >= 1 && threads <= 1024, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(config->gridDimX >= 1 && config->gridDimX <= 0x7fffffffu, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(config->gridDimY >= 1 && config->gridDimY <= 65535, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(config->gridDimZ >= 1 && config->gridDimZ <= 65535, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(config->sharedMemBytes <= (unsigned)function->max_dynamic_shared, CUDA_ERROR_INVALID_VALUE);
    unsigned cluster[3] = {1, 1, 1}, cooperative = 0, pdl = 0;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const CUlaunchAttributeValue* value = &config->attrs[i].value;
        REQUIRE(capability() >= 90, CUDA_ERROR_NOT_SUPPORTED);
        switch (config->attrs[i].id) {
            case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
                pdl = (unsigned)value->programmaticStreamSerializationAllowed;
                break;
            case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
                cooperative = (unsigned)value->cooperative;
                break;
            case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
                cluster[0] = value->clusterDim.x;
                cluster[1] = value->clusterDim.y;
                cluster[2] = value->clusterDim.z;
                break;
            default:
                return refuse(__func__, CUDA_ERROR_INVALID_VALUE, "an attribute that the stand-in knows");
        }
    }
    const unsigned ctas = cluster[0] * cluster[1] * cluster[2];
    REQUIRE(ctas >= 1 && ctas <= (function->any_cluster_size ? 16u : 8u), CUDA_ERROR_INVALID_CLUSTER_SIZE);
    REQUIRE(config->gridDimX % cluster[0] == 0, CUDA_ERROR_INVALID_CLUSTER_SIZE);
    REQUIRE(config->gridDimY % cluster[1] == 0, CUDA_ERROR_INVALID_CLUSTER_SIZE);
    REQUIRE(config->gridDimZ % cluster[2] == 0, CUDA_ERROR_INVALID_CLUSTER_SIZE);

    if (cooperative) {
        const unsigned room = 2 * (unsigned)number("FAKE_GREEN", number("FAKE_SMS", 132));
        REQUIRE(config->gridDimX <= room, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
        if (number("FAKE_TOO_LARGE", 0)) {
            record("{\"call\": \"too large\", \"kernel\": \"%s\"}", function->name);
            return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
        }
    }

    char text[4096] = "";
    size_t used = 0;
    long sizes[4];
    const int count = parameter_sizes(function->name, sizes);
    REQUIRE(count > 0, CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < count; ++i) {
        used += (size_t)snprintf(text + used, sizeof text - used, "%s\"", i ? ", " : "");
        for (long byte = 0; byte < sizes[i] && used + 4 < sizeof text; ++byte) {
            used += (size_t)snprintf(text + used, sizeof text - used, "%02x", ((const unsigned char*)parameters[i])[byte]);
        }
        used += (size_t)snprintf(text + used, sizeof text - used, "\"");
    }
    record(
        "{\"call\": \"cuLaunchKernelEx\", \"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, "
        "\"shared_limit\": %d, \"stream\": %llu, \"context\": %llu, \"attributes\": %u, \"pdl\": %u, \"cooperative\": %u, "
        "\"cluster\": [%u, %u, %u], \"parameters\": [%s]}",
        function->name, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
        config->blockDimZ, config->sharedMemBytes, function->max_dynamic_shared, (unsigned long long)(uintptr_t)config->hStream,
        (unsigned long long)(uintptr_t)current, config->numAttrs, pdl, cooperative, cluster[0], cluster[1], cluster[2], text);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
    static _Thread_local char text[32];
    snprintf(text, sizeof text, "CUDA_ERROR_%d", error);
    *name = text;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) { return cuGetErrorName(error, text); }
