// The stand-in's tensor maps, green contexts and launches.
#pragma once
#include "state.h"

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
        const int has_words = !strncmp(at, kernel, length) && (!kernel[length] || kernel[length] == '_');
        if (has_words && length > best_length) {
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
    const int count = parameter_sizes(function->name, sizes), name_is_in_signatures = count > 0;
    REQUIRE(name_is_in_signatures, CUDA_ERROR_INVALID_VALUE);
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
