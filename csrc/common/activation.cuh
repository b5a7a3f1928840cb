// What GEMM1's epilogue does with its fp32 sums (params.rs, Activation). The kind is the same for a whole launch.
#pragma once
#include "oxmoe/src/params.rs.h"

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

// Every kind but Identity. The sigmoid kinds are one formula, x sigmoid(x (alpha + cubic x^2)): tanh-approximated GELU is
// alpha 2 sqrt(2 / pi), cubic 0.044715 alpha.
struct ActivationFunction {
    float slope, cubic;  // of the sigmoid's argument, times -log2(e)
    float beta, gate_limit, silu_limit, up_limit;
    bool exact, squared;

    __device__ __forceinline__ explicit ActivationFunction(const Activation& activation) {
        constexpr float kLog2e = 1.44269504f, kTanhAlpha = 1.5957691216f, kInfinity = __builtin_huge_valf();
        const bool is_swiglu = activation.kind == ActivationKind::Swiglu;
        const bool is_tanh = activation.kind == ActivationKind::GegluTanh || activation.kind == ActivationKind::GeluTanh;
        slope = -kLog2e * (is_swiglu ? activation.alpha : is_tanh ? kTanhAlpha : 1.f);
        cubic = is_tanh ? 0.044715f * slope : 0.f;
        beta = is_swiglu ? activation.beta : 0.f;
        gate_limit = is_swiglu ? activation.gate_limit : kInfinity;
        silu_limit = is_swiglu ? activation.silu_limit : kInfinity;
        up_limit = is_swiglu ? activation.up_limit : kInfinity;
        exact = activation.kind == ActivationKind::Geglu || activation.kind == ActivationKind::Gelu;
        squared = activation.kind == ActivationKind::Relu2;
    }

    __device__ __forceinline__ float sigmoid_gate(float x) const {
        const float argument = x * fmaf(cubic * x, x, slope);
        return x * reciprocal_fast(1.f + exp2_fast(argument));
    }

    // The gated kinds whose `exact` is false.
    __device__ __forceinline__ float gated(float gate, float up) const {
        const float silu = min_nan(sigmoid_gate(min_nan(gate, gate_limit)), silu_limit);
        return silu * (max_nan(min_nan(up, up_limit), -up_limit) + beta);
    }

    // The kinds without a gate.
    __device__ __forceinline__ float plain(float x) const {
        if (squared) {
            const float positive = max_nan(x, 0.f);
            return positive * positive;
        }
        return exact ? gelu_exact(x) : sigmoid_gate(x);
    }
};

}  // namespace oxmoe
