// Vectors of numbers, and functions of them, through the extensions of g++.

#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

namespace {

// A vector has 16 numbers: a register of AVX-512.
constexpr int LANES = 16;
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int8_t UnalignedBytes __attribute__((vector_size(LANES), aligned(1), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline UnalignedBytes load_bytes(const bool* from, int64_t count) {  // zeros behind so many
  UnalignedBytes bytes = {};
  if (count >= LANES) return *reinterpret_cast<const UnalignedBytes*>(from);
  memcpy(&bytes, from, count);
  return bytes;
}
inline Vector load_halves(const uint16_t* from) {  // numbers of half precision
  return reinterpret_cast<Vector>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
inline uint16_t to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
inline float from_half(uint16_t value) { return _cvtsh_ss(value); }
inline void store(float* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }
inline void store_bytes(int8_t* to, Integers values) {
  *reinterpret_cast<UnalignedBytes*>(to) = __builtin_convertvector(values, UnalignedBytes);
}
// Subtracting 0 changes no number, so the compiler leaves it out. It has to keep an addition, which makes -0 to 0.
inline Vector all(float value) { return value - Vector{}; }
inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }
inline Vector smaller(Vector a, Vector b) { return a < b ? a : b; }

// 1.5 * 2^23: the last bits of what is added to it are those of the nearest whole number.
constexpr float TO_INTEGER = 12582912.f;

// The nearest whole numbers, even ones between two; x is below 2^22 in magnitude.
inline Integers to_integers(Vector x) {
  const Vector shifted = x + TO_INTEGER;
  return reinterpret_cast<Integers>(shifted) - 0x4B400000;
}

// exp by argument reduction and the Taylor polynomial of degree 7, whose error is below 2e-7 of the result.
// x is at most 88; what lies below -87 counts as -87.
inline Vector exponential(Vector x) {
  const float log2_e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  x = larger(x, all(-87.f));
  const Vector rounded = x * log2_e + TO_INTEGER;
  const Vector power = rounded - TO_INTEGER;
  const Vector rest = (x - power * ln2_high) - power * ln2_low;
  Vector sum = all(1.f / 5040);
  sum = sum * rest + 1.f / 720;
  sum = sum * rest + 1.f / 120;
  sum = sum * rest + 1.f / 24;
  sum = sum * rest + 1.f / 6;
  sum = sum * rest + 0.5f;
  sum = sum * rest + 1.f;
  sum = sum * rest + 1.f;
  return reinterpret_cast<Vector>(reinterpret_cast<Integers>(sum) + (reinterpret_cast<Integers>(rounded) << 23));
}

// Scores between softcap and its negative: softcap * tanh(x / softcap).
inline Vector capped(Vector x, float softcap) {
  const Vector twice = x * (2 / softcap);
  return softcap - 2 * softcap / (exponential(smaller(twice, all(88.f))) + 1.f);
}

// A vector whose lanes have changed places in pairs: lane i has what lane i ^ DISTANCE had.
template <int DISTANCE, class Values>
inline Values exchanged(Values x) {
  Integers places;
  for (int lane = 0; lane < LANES; ++lane) places[lane] = lane ^ DISTANCE;
  return __builtin_shuffle(x, places);
}

inline float largest_of(Vector x) {
  x = larger(x, exchanged<8>(x));
  x = larger(x, exchanged<4>(x));
  x = larger(x, exchanged<2>(x));
  return larger(x, exchanged<1>(x))[0];
}

template <class Values>
inline auto sum_of(Values x) {
  x += exchanged<8>(x);
  x += exchanged<4>(x);
  x += exchanged<2>(x);
  return (x + exchanged<1>(x))[0];
}

// The sums of 16 vectors, one in each lane. Each is added up by halves, in the same order in every lane.
template <int WIDTH>
inline void add_halves(Vector* parts) {
  constexpr int COUNT = WIDTH / 2;
  Integers kept, moved;
  for (int lane = 0; lane < LANES; ++lane) {
    // The blocks of one vector have their first halves, and those of another one their second halves, where the sums
    // belong; the other halves change places.
    const bool is_second = lane % WIDTH >= COUNT;
    kept[lane] = is_second ? lane + LANES : lane;
    moved[lane] = is_second ? lane + LANES - COUNT : lane + COUNT;
  }
  for (int part = 0; part < COUNT; ++part) {
    const Vector a = parts[part], b = parts[part + COUNT];
    parts[part] = __builtin_shuffle(a, b, kept) + __builtin_shuffle(a, b, moved);
  }
}

inline Vector sums(Vector* parts) {
  add_halves<16>(parts);
  add_halves<8>(parts);
  add_halves<4>(parts);
  add_halves<2>(parts);
  return parts[0];
}

}  // namespace
