// The stand-in's calls on memory: allocations, copies, and memory that processes share.
#pragma once
#include "state.h"

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
