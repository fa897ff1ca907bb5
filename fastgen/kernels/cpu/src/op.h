// How operations are called from outside.
//
// An operation is an extern "C" function of one pointer, to a struct whose fields are all 8 bytes wide (pointers, int64_t,
// double), in the order in which Python passes them. So any language can call it, and a call can be written down and made
// again (program.cpp).
#pragma once

#include <cstdint>

#include "simd.h"

namespace fg {

// Number formats by their code in arguments.
enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1 };

// f(T{}) with T the C++ type of `dtype`.
template <class F>
inline void with_type(int64_t dtype, const F& f) {
  if (dtype == kBFloat16) f(bf16{});
  else f(float{});
}

}  // namespace fg
