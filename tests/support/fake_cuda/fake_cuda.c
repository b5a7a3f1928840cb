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
// FAKE_PARAMETERS  "route:120,112;combine:48": sizes of the parameters of kernels, by first words of names; the longest counts
//
// The calls on devices, contexts, modules and streams are here. Those on memory and launches are in files of their own.
#include "state.h"

#include "launch_calls.h"
#include "memory_calls.h"

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

CUresult cuGetErrorName(CUresult error, const char** name) {
    static _Thread_local char text[32];
    snprintf(text, sizeof text, "CUDA_ERROR_%d", error);
    *name = text;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) { return cuGetErrorName(error, text); }
