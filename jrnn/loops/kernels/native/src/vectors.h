// Vectors by the compiler's extension, and functions of them. Compiled once for each instruction set.
//
// exp, tanh and logistic are within 2 units in the last place. Results below the least normal number may be 0, as
// XLA's are. NaN stays NaN.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef JRNN_VECTOR_BYTES
#define JRNN_VECTOR_BYTES 16
#endif
#define JRNN_INLINE inline __attribute__((always_inline))

namespace {

template <class F>
struct Of;
template <>
struct Of<float> {
  typedef float V __attribute__((vector_size(JRNN_VECTOR_BYTES)));
  typedef int32_t I __attribute__((vector_size(JRNN_VECTOR_BYTES)));
  typedef uint32_t U __attribute__((vector_size(JRNN_VECTOR_BYTES)));
  static constexpr int mantissa = 23, bias = 127;
  static constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr float exp_least = -88.0f, exp_most = 88.72284f, tanh_most = 9.2f, least_normal = 1.17549435e-38f;
  static constexpr int exp_terms = 5, log_terms = 6;  // (e^r - 1 - r) / r^2: the polynomial with the least largest error
  static constexpr float exp_series[] = {0.50000001f, 0.166665159f, 0.0416661967f, 0.00836923933f, 0.00139510975f};
};
template <>
struct Of<double> {
  typedef double V __attribute__((vector_size(JRNN_VECTOR_BYTES)));
  typedef int64_t I __attribute__((vector_size(JRNN_VECTOR_BYTES)));
  typedef uint64_t U __attribute__((vector_size(JRNN_VECTOR_BYTES)));
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr double magic = 6755399441055744.0;
  static constexpr double ln2_high = 0.693145751953125, ln2_low = 1.42860682030941723212e-6;
  static constexpr double exp_least = -709.0, exp_most = 709.78271289338397, tanh_most = 20.0;
  static constexpr double least_normal = 2.2250738585072014e-308;
  static constexpr int exp_terms = 12, log_terms = 12;  // 1 / 2!, 1 / 3!, ...
  static constexpr double exp_series[] = {1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,
                                          1.0 / 720,    1.0 / 5040,    1.0 / 40320,    1.0 / 362880,
                                          1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};
};

template <class F>
using Vec = typename Of<F>::V;
template <class F>
using Ints = typename Of<F>::I;
template <class F>
constexpr int kLanes = JRNN_VECTOR_BYTES / sizeof(F);

template <class F>
JRNN_INLINE Vec<F> all(F value) {
  return Vec<F>{} + value;
}
template <class F>
JRNN_INLINE Vec<F> load(const F* p) {
  Vec<F> v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class F>
JRNN_INLINE void store(F* p, Vec<F> v) {
  memcpy(p, &v, sizeof v);
}
template <class F>
JRNN_INLINE Vec<F> load_some(const F* p, int64_t n) {
  Vec<F> v{};
  for (int64_t i = 0; i < n; i++) v[i] = p[i];
  return v;
}
template <class F>
JRNN_INLINE void store_some(F* p, Vec<F> v, int64_t n) {
  for (int64_t i = 0; i < n; i++) p[i] = v[i];
}

// Returns the elements of two vectors at some places, which are constants.
template <class F>
JRNN_INLINE Vec<F> shuffled(Vec<F> a, Vec<F> b, Ints<F> places) {
#if defined(__clang__)
  Vec<F> out;
  for (int i = 0; i < kLanes<F>; i++) out[i] = places[i] < kLanes<F> ? a[places[i]] : b[places[i] - kLanes<F>];
  return out;
#else
  return __builtin_shuffle(a, b, places);
#endif
}

template <class F, class T>
JRNN_INLINE T bits_as(Vec<F> v) {
  T out;
  memcpy(&out, &v, sizeof out);
  return out;
}
template <class F, class T>
JRNN_INLINE Vec<F> as_floats(T bits) {
  Vec<F> out;
  memcpy(&out, &bits, sizeof out);
  return out;
}

template <class F>
JRNN_INLINE Vec<F> absolute(Vec<F> x) {
  typedef typename Of<F>::U U;
  return as_floats<F>((bits_as<F, U>(x) << 1) >> 1);
}
template <class F>
JRNN_INLINE Vec<F> with_sign(Vec<F> x, Vec<F> of) {
  typedef typename Of<F>::U U;
  U sign = (bits_as<F, U>(of) >> (8 * sizeof(F) - 1)) << (8 * sizeof(F) - 1);
  return as_floats<F>(bits_as<F, U>(x) | sign);
}
template <class F>
JRNN_INLINE Vec<F> greater(Vec<F> a, Vec<F> b) {  // NaN if either is
  return (a > b) | (a != a) ? a : b;
}
template <class F>
JRNN_INLINE Vec<F> smaller(Vec<F> a, Vec<F> b) {
  return (a < b) | (a != a) ? a : b;
}

// x = n ln 2 + r; `shifted` holds n in its lowest bits.
template <class F>
struct Split {
  Vec<F> shifted, n, r;
};
template <class F>
JRNN_INLINE Split<F> split_exponent(Vec<F> x) {
  Split<F> s;
  s.shifted = x * F(1.44269504088896340736) + Of<F>::magic;
  s.n = s.shifted - Of<F>::magic;
  s.r = (x - s.n * Of<F>::ln2_high) - s.n * Of<F>::ln2_low;
  return s;
}
template <class F>
JRNN_INLINE Vec<F> power_of_two(Vec<F> shifted) {  // 0 for n = -bias
  typedef typename Of<F>::U U;
  return as_floats<F>((bits_as<F, U>(shifted) + U(U{} + Of<F>::bias)) << Of<F>::mantissa);
}
template <class F>
JRNN_INLINE Vec<F> expm1_of_rest(Vec<F> r) {  // e^r - 1 for |r| <= ln 2 / 2
  Vec<F> sum = all<F>(Of<F>::exp_series[Of<F>::exp_terms - 1]);
#pragma GCC unroll 16
  for (int i = Of<F>::exp_terms - 2; i >= 0; i--) sum = sum * r + Of<F>::exp_series[i];
  return sum * (r * r) + r;
}
template <class F>
JRNN_INLINE Vec<F> exponential(Vec<F> x) {
  typedef typename Of<F>::U U;
  const F bound = F(Of<F>::bias + 1 + Of<F>::mantissa) * F(0.6931471805599453);
  Vec<F> within = x > bound ? all<F>(bound) : x;
  within = within < -bound ? all<F>(-bound) : within;
  Split<F> s = split_exponent<F>(within);
  Vec<F> half = s.n * F(0.5) + Of<F>::magic;  // two factors, because 2^n may be too large or small
  U rest = bits_as<F, U>(s.shifted) - bits_as<F, U>(half) + U(U{} + Of<F>::bias);
  return ((expm1_of_rest<F>(s.r) + F(1)) * power_of_two<F>(half)) * as_floats<F>(rest << Of<F>::mantissa);
}
template <class F>
JRNN_INLINE Vec<F> logistic(Vec<F> x) {
  Vec<F> within = x < Of<F>::exp_least ? all<F>(Of<F>::exp_least) : x;
  within = within > -Of<F>::exp_least ? all<F>(-Of<F>::exp_least) : within;
  Split<F> s = split_exponent<F>(-within);
  Vec<F> scale = power_of_two<F>(s.shifted);
  return F(1) / ((expm1_of_rest<F>(s.r) * scale + F(1)) + scale);  // scale + 1 would lose the 1 from 2^24
}
template <class F>
JRNN_INLINE Vec<F> hyperbolic_tangent(Vec<F> x) {
  Vec<F> a = absolute<F>(x);
  a = a > Of<F>::tanh_most ? all<F>(Of<F>::tanh_most) : a;
  Split<F> s = split_exponent<F>(a * F(-2));  // 1 + e^-2a is below 2: it is rounded half as coarsely as 1 + e^2a
  Vec<F> scale = power_of_two<F>(s.shifted), p = expm1_of_rest<F>(s.r);
  return with_sign<F>(((F(1) - scale) - p * scale) / ((F(1) + scale) + p * scale), x);
}
template <class F>
JRNN_INLINE Vec<F> expm1(Vec<F> x) {
  Vec<F> low = x < Of<F>::exp_least ? all<F>(Of<F>::exp_least) : x;
  Split<F> s = split_exponent<F>(low);
  Vec<F> scale = power_of_two<F>(s.shifted);
  Vec<F> near = expm1_of_rest<F>(s.r) * scale + (scale - F(1));
  return x > -Of<F>::exp_least - F(1) ? exponential<F>(x) : near;
}
template <class F>
JRNN_INLINE Vec<F> logarithm(Vec<F> x) {
  typedef typename Of<F>::U U;
  typedef Ints<F> I;
  // x = m 2^k with m between sqrt(1/2) and sqrt(2); log m = 2 (s + s^3 / 3 + s^5 / 5 ...) with s = (m - 1) / (m + 1)
  U root = bits_as<F, U>(all<F>(F(0.70710678118654752440)));
  U ones = bits_as<F, U>(all<F>(F(1)));
  U moved = bits_as<F, U>(x) - root;
  I k = (I)moved >> Of<F>::mantissa;
  U m_bits = bits_as<F, U>(x) - ((U)k << Of<F>::mantissa);
  (void)ones;
  Vec<F> m = as_floats<F>(m_bits), count = __builtin_convertvector(k, Vec<F>);
  Vec<F> s = (m - F(1)) / (m + F(1)), s2 = s * s;
  Vec<F> sum = all<F>(F(2.0 / (2 * Of<F>::log_terms - 1)));
#pragma GCC unroll 16
  for (int i = Of<F>::log_terms - 1; i >= 2; i--) sum = sum * s2 + F(2.0 / (2 * i - 1));
  Vec<F> y = count * Of<F>::ln2_high + (s * F(2) + (sum * s2 * s + count * Of<F>::ln2_low));
  const F infinite = F(INFINITY);
  y = x < Of<F>::least_normal ? all<F>(-infinite) : y;
  y = (x < F(0)) | (x != x) ? all<F>(F(NAN)) : y;
  return x == infinite ? x : y;
}
template <class F>
JRNN_INLINE Vec<F> log1p(Vec<F> x) {
  Vec<F> u = x + F(1);
  Vec<F> lost = (x - (u - F(1))) / u;
  Vec<F> y = logarithm<F>(u);
  return (u > F(0)) & (u < F(INFINITY)) ? y + lost : y;
}
template <class F>
JRNN_INLINE Vec<F> square_root(Vec<F> x) {
  Vec<F> out;
  for (int i = 0; i < kLanes<F>; i++) out[i] = sizeof(F) == 4 ? F(sqrtf(float(x[i]))) : F(sqrt(double(x[i])));
  return out;
}
template <class F>
JRNN_INLINE Vec<F> rounded(Vec<F> x) {  // to even; numbers without a fraction stay
  Vec<F> whole = with_sign<F>((absolute<F>(x) + Of<F>::magic * F(2.0 / 3)) - Of<F>::magic * F(2.0 / 3), x);
  return absolute<F>(x) < Of<F>::magic * F(2.0 / 3) ? whole : x;
}
template <class F>
JRNN_INLINE Vec<F> to_bfloat16(Vec<F> x) {  // rounded to even; only for float
  typedef typename Of<float>::U U;
  if (sizeof(F) != 4) return x;
  U bits = bits_as<F, U>(x);
  U up = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return x != x ? x : as_floats<F>(up);
}

}  // namespace
