// What GEMM1's epilogue does with its fp32 sums (params/moe.rs, Activation). The kind is the same for a whole launch.
#pragma once
#include "oxmoe/src/params/moe.rs.h"

namespace oxmoe {

// NOTE: the .NaN forms; fminf and fmaxf would turn a NaN sum into a limit.
__device__ __forceinline__ float min_nan(float a, float b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float max_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ __forceinline__ float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
__device__ __forceinline__ float reciprocal_fast(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// x Phi(x), Phi by Abramowitz and Stegun 7.1.26: |error of Phi| < 1e-7.
__device__ __forceinline__ float gelu_exact(float x) {
    const float z = fabsf(x) * 0.70710678f;
    const float t = reciprocal_fast(fmaf(0.3275911f, z, 1.f));
    const float series =
        fmaf(fmaf(fmaf(fmaf(1.061405429f, t, -1.453152027f), t, 1.421413741f), t, -0.284496736f), t, 0.254829592f);
    const float tail = 0.5f * series * t * exp2_fast(z * z * -1.44269504f);
    return x * (x < 0.f ? tail : 1.f - tail);
}

__device__ __forceinline__ float sigmoid_fast(float x) { return reciprocal_fast(1.f + exp2_fast(x * -1.44269504f)); }

// The activation with an expert's own numbers.
__device__ __forceinline__ Activation activation_of(const GroupedGemmParams& p, int expert) {
    Activation activation = p.activation;
    if (activation.kind != ActivationKind::ExpertSwiglu) return activation;
    activation.kind = ActivationKind::Swiglu;
    if (p.expert_alpha) activation.alpha = p.expert_alpha[expert];
    if (p.expert_beta) activation.beta = p.expert_beta[expert];
    if (p.expert_limit) {
        activation.up_limit = p.expert_limit[expert];
        (p.expert_limit_after ? activation.silu_limit : activation.gate_limit) = activation.up_limit;
    }
    return activation;
}

// The Swiglu kind, plain or with limits.
struct SwigluFunction {
    float slope, beta, gate_limit, silu_limit, up_limit;

    __device__ __forceinline__ explicit SwigluFunction(const Activation& activation)
        : slope(activation.alpha * -1.44269504f),
          beta(activation.beta),
          gate_limit(activation.gate_limit),
          silu_limit(activation.silu_limit),
          up_limit(activation.up_limit) {}

    __device__ __forceinline__ float operator()(float gate, float up) const {
        const float x = min_nan(gate, gate_limit);
        const float silu = min_nan(x * reciprocal_fast(1.f + exp2_fast(x * slope)), silu_limit);
        return silu * (max_nan(min_nan(up, up_limit), -up_limit) + beta);
    }

    // The same bits without limits, in seven instructions instead of eleven.
    __device__ __forceinline__ bool has_limits() const { return fminf(fminf(gate_limit, silu_limit), up_limit) < INFINITY; }
    __device__ __forceinline__ float unlimited(float gate, float up) const {
        return gate * reciprocal_fast(1.f + exp2_fast(gate * slope)) * (up + beta);
    }
};

// The other kinds, of one value; gated kinds multiply the result by up.
struct ActivationFunction {
    ActivationKind kind;

    __device__ __forceinline__ explicit ActivationFunction(const Activation& activation) : kind(activation.kind) {}

    __device__ __forceinline__ float operator()(float x) const {
        if (kind == ActivationKind::Geglu || kind == ActivationKind::Gelu) return gelu_exact(x);
        if (kind == ActivationKind::GegluTanh || kind == ActivationKind::GeluTanh) {
            return x * sigmoid_fast(x * fmaf(0.0713548163f * x, x, 1.5957691216f));
        }
        if (kind == ActivationKind::Silu) return x * sigmoid_fast(x);
        if (kind == ActivationKind::Relu2) return max_nan(x, 0.f) * max_nan(x, 0.f);
        return x;
    }
};

}  // namespace oxmoe
