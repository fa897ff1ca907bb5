// Functions of vectors, within 2 units in the last place: what the C library offers only for one number at a time.
#pragma once

#include <cmath>

#include "simd.h"

namespace fg {

inline Floats abs(Floats x) { return (Floats)((Words)x & 0x7fffffff); }
inline Floats copy_sign(Floats size, Floats sign) {
  return (Floats)(((Words)size & 0x7fffffff) | ((Words)sign & 0x80000000));
}

// 2^n, n in -126 .. 127.
inline Floats power_of_two(Ints n) { return (Floats)((n + 127) << 23); }

// e^x = 2^n e^r, with a polynomial for e^r of |r| <= ln(2) / 2 (Cephes' expf).
struct Power {
  Floats rest;  // e^r
  Ints n;
};

inline Power power(Floats x) {
  const Floats round = splat(12582912.f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  Floats shifted = x * 1.44269504f + round;
  Floats whole = shifted - round;
  Floats r = x - whole * 0.693359375f;
  r = r + whole * 2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return {p * (r * r) + r + 1.f, (Ints)shifted - (Ints)round};
}

// e^x: 0 at minus infinity, infinity where it does not fit, NaN for NaN. 2^n in two factors, as 2^128 and 2^-149 are
// none.
inline Floats exp(Floats x) {
  Ints vanishes = x < -104.f;  // kept out of the arithmetic: processors are slow where results underflow
  x = vanishes ? Floats{} : x;
  x = x > 89.f ? splat(89.f) : x;
  Power e = power(x);
  Ints half = e.n >> 1;
  return vanishes ? Floats{} : e.rest * power_of_two(half) * power_of_two(e.n - half);
}

// e^x of what is not above 0, with less work: 0 from where the result is no normal number any more.
inline Floats exp_of_negative(Floats x) {
  Power e = power(x);
  Ints counts = (x >= -87.f) | (x != x);
  return (Floats)((Words)(e.rest * power_of_two(e.n)) & (Words)counts);
}

// Odd polynomial (Cephes' tanhf) where 1 - 2 / (e^2x + 1) would cancel.
inline Floats tanh(Floats x) {
  Floats size = abs(x), square = x * x;
  Floats p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  Floats near = p * square * x + x;
  Floats far = copy_sign(1.f - 2.f / (exp(2.f * size) + 1.f), x);
  return size < 0.625f ? near : far;
}

// Odd polynomial near 0, else 1 - e^-polynomial (N. Juffa's fit, public domain).
inline Floats erf(Floats x) {
  Floats size = abs(x), square = x * x;
  Floats p = splat(-5.96761703e-4f);
  p = p * square + 4.99119423e-3f;
  p = p * square - 2.67681349e-2f;
  p = p * square + 1.12819925e-1f;
  p = p * square - 3.76125336e-1f;
  p = p * square + 1.28379166e-1f;
  Floats near = p * x + x;
  Floats t = size < 4.f ? size : splat(4.f);  // 1 from there on, to the last place
  Floats q = splat(-1.72853470e-5f);
  q = q * t + 3.83197126e-4f;
  q = q * t - 3.88396438e-3f;
  q = q * t + 2.42546219e-2f;
  q = q * t - 1.06777877e-1f;
  q = q * t - 6.34846687e-1f;
  q = q * t - 1.28717512e-1f;
  q = q * t - t;
  Floats far = copy_sign(1.f - exp(q), x);
  return (size < 0.927734375f) | (x != x) ? near : far;
}

}  // namespace fg
