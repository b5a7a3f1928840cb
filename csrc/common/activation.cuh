// The activations that GEMM1's epilogue applies to its fp32 sums (params/moe.rs, Activation). The kind is the same for a whole
// launch.
#pragma once
#include "oxmoe/src/params/moe.rs.h"

namespace oxmoe {

// NOTE: these are the .NaN forms, because fminf and fmaxf would turn a NaN sum into a limit.
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

// x Phi(x), with Phi by Abramowitz and Stegun 7.1.26: |error of Phi| < 1e-7.
__device__ __forceinline__ float gelu_exact(float x) {
    const float z = fabsf(x) * 0.70710678f;
    const float t = reciprocal_fast(fmaf(0.3275911f, z, 1.f));
    const float series =
        fmaf(fmaf(fmaf(fmaf(1.061405429f, t, -1.453152027f), t, 1.421413741f), t, -0.284496736f), t, 0.254829592f);
    const float tail = 0.5f * series * t * exp2_fast(z * z * -1.44269504f);
    return x * (x < 0.f ? tail : 1.f - tail);
}

__device__ __forceinline__ float sigmoid_fast(float x) { return reciprocal_fast(1.f + exp2_fast(x * -1.44269504f)); }

// The activation of a launch with an expert's own alpha, beta and limit.
__device__ __forceinline__ Activation activation_of(const GroupedGemmParams& p, int expert) {
    Activation activation = p.activation;
    if (activation.kind == ActivationKind::ExpertSwiglu)
        activation.kind = ActivationKind::Swiglu;
    else if (activation.kind != ActivationKind::Situ)
        return activation;
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

    // unlimited() gives the same bits if there are no limits, in seven instructions instead of eleven.
    __device__ __forceinline__ bool has_limits() const { return fminf(fminf(gate_limit, silu_limit), up_limit) < INFINITY; }
    __device__ __forceinline__ float unlimited(float gate, float up) const {
        return gate * reciprocal_fast(1.f + exp2_fast(gate * slope)) * (up + beta);
    }
};

// The Situ kind. tanh(z) / z is a quotient of polynomials in z^2 (minimax for |z| <= 7; a larger |z| is clamped to 7). The
// relative error of a tanh is below 2^-19 also for tiny z, for which tanh(z) is z.
struct SituFunction {
    float inverse, bound, linear_inverse, linear_bound;
    bool unlimited;  // up has no tanh

    __device__ __forceinline__ SituFunction(float beta, float linear_beta)
        : inverse(reciprocal_fast(beta)),
          bound(7.f * beta),
          linear_inverse(reciprocal_fast(linear_beta)),
          linear_bound(fminf(7.f * linear_beta, 3.40282347e38f)),
          unlimited(!(linear_beta < INFINITY)) {}
    __device__ __forceinline__ explicit SituFunction(const Activation& activation)
        : SituFunction(activation.alpha, activation.beta) {}
    // NOTE: activation_of would share its loads with the Swiglu kind, which has them too, and whose code would then need more
    // registers.
    __device__ __forceinline__ SituFunction(const GroupedGemmParams& p, int expert)
        : SituFunction(p.expert_alpha ? p.expert_alpha[expert] : p.activation.alpha,
                       p.expert_beta ? p.expert_beta[expert] : p.activation.beta) {}

    __device__ __forceinline__ float operator()(float gate, float up) const {
        float divisor, linear_divisor;
        const float limited = dividend(gate, inverse, bound, divisor);
        const float linear = dividend(up, linear_inverse, linear_bound, linear_divisor);
        const float silu = limited * reciprocal_fast(divisor * linear_divisor) * sigmoid_fast(gate);
        return silu * (unlimited ? up : linear);
    }

private:
    // The limited value of x is the result divided by `divisor`.
    static __device__ __forceinline__ float dividend(float x, float inverse, float bound, float& divisor) {
        x = max_nan(min_nan(x, bound), -bound);
        const float z = x * inverse, square = z * z;
        divisor = fmaf(fmaf(fmaf(1.44658304e-4f, square, 2.11840487e-2f), square, 0.456629403f), square, 1.f);
        return x * fmaf(fmaf(fmaf(4.02316957e-6f, square, 2.29969610e-3f), square, 0.123301308f), square, 1.f);
    }
};

// The other kinds, as functions of one value; gated kinds multiply the result by up.
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
