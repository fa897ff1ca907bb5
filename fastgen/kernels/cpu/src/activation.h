// Activation functions of vectors, with torch's values at infinities (x times 0 is NaN at minus infinity) and NaN.
#pragma once

#include "math.h"
#include "rows.h"

namespace fg {

// By their code in arguments.
enum Activation : int64_t { kGelu, kGeluTanh, kMish, kQuickGelu, kRelu, kReluSquared, kSigmoid, kSilu, kTanh };

inline Floats sigmoid(Floats x) { return 1.f / (1.f + exp(-x)); }
inline Floats relu(Floats x) { return x < 0.f ? Floats{} : x; }

// x of a T through A, rounded where torch rounds to T on the way; the result is not yet.
template <Activation A, class T>
inline Floats activate(Floats x) {
  if constexpr (A == kGelu) {
    return 0.5f * x * (1.f + erf(x * 0.707106781f));
  } else if constexpr (A == kGeluTanh) {
    return 0.5f * x * (1.f + tanh(0.797884561f * (x + 0.044715f * x * x * x)));
  } else if constexpr (A == kMish) {  // x tanh(log(1 + e)), e = e^x; from 20 on x itself
    Floats e = exp(min(x, splat(20.f))), n = e * (e + 2.f);
    return x * (n / (n + 2.f));
  } else if constexpr (A == kQuickGelu) {
    return x * rounded<T>(sigmoid(rounded<T>(1.702f * x)));
  } else if constexpr (A == kRelu) {
    return relu(x);
  } else if constexpr (A == kReluSquared) {
    return relu(x) * relu(x);
  } else if constexpr (A == kSigmoid) {
    return sigmoid(x);
  } else if constexpr (A == kSilu) {
    return x / (1.f + exp(-x));
  } else {
    static_assert(A == kTanh);
    return tanh(x);
  }
}

template <Activation A>
struct Named {
  static constexpr Activation value = A;
};

// f(Named<A>{}) with A the activation of this code.
template <class F>
inline void with_activation(int64_t code, const F& f) {
  switch (code) {
    case kGelu: return f(Named<kGelu>{});
    case kGeluTanh: return f(Named<kGeluTanh>{});
    case kMish: return f(Named<kMish>{});
    case kQuickGelu: return f(Named<kQuickGelu>{});
    case kRelu: return f(Named<kRelu>{});
    case kReluSquared: return f(Named<kReluSquared>{});
    case kSigmoid: return f(Named<kSigmoid>{});
    case kSilu: return f(Named<kSilu>{});
    case kTanh: return f(Named<kTanh>{});
  }
}

}  // namespace fg
