// The 16-bit element types of activations and weights: conversion to and from fp32.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace oxmoe {

__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }

template <typename Element>
__device__ __forceinline__ Element from_float(float value);
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
    return __float2half_rn(value);
}

// Two values rounded to nearest even, with `low` in the lower half of the word.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t word);
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
}
template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t word) {
    return __half22float2(reinterpret_cast<__half2&>(word));
}

}  // namespace oxmoe
