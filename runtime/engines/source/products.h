// TreeProduct: rows times a matrix of weights in float32, int8 or int4.
//
// The weights of 16 columns are read once for as many rows as a draft tree has nodes, which makes a pass over a tree
// about as fast as memory gives its weights. For quantised weights rows are rounded to int8, in the blocks that share
// a scale of the weights, or as a whole: whole numbers are added up within a block, where order does not matter, and
// the blocks one after the other. In float32 products are added up in the order of the row. So a row has the same
// bits beside any other rows.

#pragma once

#include <cstdlib>
#include <cstring>

#include <immintrin.h>
#include <sys/mman.h>

#include "onnxruntime.h"
#include "vectors.h"

namespace {

typedef int8_t ManyBytes __attribute__((vector_size(64)));

// Rows whose sums are in registers at once.
constexpr int MAX_ROWS = 16;
// Weights are prefetched so many bytes before they are needed: a page, at whose end a processor stops doing it itself.
constexpr int64_t AHEAD = 4096;
// Numbers of the rows from which threads share what comes before the product.
constexpr int64_t SHARED_ROUNDING = 1 << 12;
// Parts of the columns among which threads choose.
constexpr int64_t UNITS = 32;
// A rotation multiplies every 64 neighbours of a row with the Hadamard matrix, divided by 8.
constexpr int64_t ROTATED = 64;
constexpr float LARGEST_CODE = 127;
// Weights of a block whose sum fits into 32 bits.
constexpr int64_t MAX_BLOCK = 1 << 15;

struct Weights {
  int64_t bits, block, transposed, normed, gated, rotated, added;
  int64_t depth, width, panels, blocks;  // K, N, columns by 16, and blocks of a column
  float epsilon;                         // of the norm
  uint8_t* codes;                        // [panels, K * 16 * bits / 8]; unsigned, or float32
  float* scales;                         // [panels, blocks, 16]; null if halves has them
  uint16_t* halves;                      // the same, if half precision can hold every one; otherwise null
  float* norm;                           // [K], of rows that are normed

  int64_t words() const { return bits == 32 ? depth : depth / 4; }  // of a row that is ready for the product
  Vector scales_of(int64_t panel, int64_t block) const {
    const int64_t at = (panel * blocks + block) * LANES;
    return halves ? load_halves(halves + at) : load(scales + at);
  }
};

struct Product {
  const Weights* weights;
  const float* rows;  // [count, K], or [count, 2 K] if they are gated
  int64_t count;
  int32_t* codes;    // of each part, its R rows: [words, R], four codes or a number of a row in each
  float* scales;     // [count, blocks]
  int32_t* offsets;  // [count, blocks]: what the weights' being unsigned adds to the sum of a block
  float* result;     // [count, N]
  const float* added;  // [count, N], to the result; null for nothing
  int64_t parts;       // of the rows, each of MAX_ROWS rows at most
  int64_t panels_of_unit;
  bool failed;

  int64_t first_row(int64_t part) const { return count * part / parts; }
  int64_t part_of(int64_t row) const { return ((row + 1) * parts - 1) / count; }
};

// The sums of four products of bytes in each lane: weights are unsigned, and the codes of a row are the same four.
inline Integers add_products(Integers sums, ManyBytes weights, int32_t codes) {
  return reinterpret_cast<Integers>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(weights), _mm512_set1_epi32(codes)));
}

// ---- Weights ----------------------------------------------------------------------------------------------------

// A code of the weights [K, N], made unsigned.
inline uint8_t unsigned_code(const Weights& weights, const uint8_t* codes, int64_t k, int64_t n) {
  if (n >= weights.width) return 0;
  const int64_t index = k * weights.width + n;
  if (weights.bits == 8) return codes[index] ^ 128;
  return (codes[index / 2] >> (index % 2 * 4) & 15) ^ 8;
}

// Lays out the columns of a panel as they are read: 4 rows of 8 bits, or 4 rows and the next 4 in 4 bits.
void lay_out_codes(Weights& weights, const uint8_t* codes) {
  const int64_t step = 32 / weights.bits;
  for (int64_t panel = 0; panel < weights.panels; ++panel) {
    uint8_t* to = weights.codes + panel * weights.depth * LANES * weights.bits / 8;
    for (int64_t k = 0; k < weights.depth; k += step) {
      for (int64_t n = panel * LANES; n < (panel + 1) * LANES; ++n) {
        for (int64_t row = k; row < k + 4; ++row) {
          uint8_t code = unsigned_code(weights, codes, row, n);
          if (weights.bits == 4) code |= unsigned_code(weights, codes, row + 4, n) << 4;
          *to++ = code;
        }
      }
    }
  }
}

// The same for weights in float32: [K, N], or [N, K] if they are transposed.
void lay_out_floats(Weights& weights, const float* from) {
  float* to = reinterpret_cast<float*>(weights.codes);
  for (int64_t panel = 0; panel < weights.panels; ++panel) {
    for (int64_t k = 0; k < weights.depth; ++k) {
      for (int64_t n = panel * LANES; n < (panel + 1) * LANES; ++n) {
        const int64_t at = weights.transposed ? n * weights.depth + k : k * weights.width + n;
        *to++ = n < weights.width ? from[at] : 0;
      }
    }
  }
}

// Lays out the scales [blocks, N] in the order of the codes. Returns whether there is memory for them.
bool lay_out_scales(Weights& weights, const float* scales) {
  const int64_t count = weights.panels * weights.blocks * LANES;
  weights.scales = static_cast<float*>(aligned_alloc(sizeof(Vector), count * sizeof(float)));
  if (!weights.scales) return false;
  bool are_halves = true;
  for (int64_t at = 0; at < count; ++at) {
    const int64_t n = at / (weights.blocks * LANES) * LANES + at % LANES, block = at / LANES % weights.blocks;
    weights.scales[at] = n < weights.width ? scales[block * weights.width + n] : 0;
    are_halves = are_halves && from_half(to_half(weights.scales[at])) == weights.scales[at];
  }
  if (!are_halves) return true;
  weights.halves = static_cast<uint16_t*>(malloc(count * sizeof(uint16_t)));
  if (!weights.halves) return false;
  for (int64_t at = 0; at < count; ++at) weights.halves[at] = to_half(weights.scales[at]);
  free(weights.scales);
  weights.scales = nullptr;
  return true;
}

// Lets the system take the pages of codes that nobody reads again, but may: those of a file stay in the file.
void give_back(void* codes, int64_t bytes) {
#if defined(MADV_PAGEOUT)
  constexpr uintptr_t PAGE = 4096;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(codes) + PAGE - 1) & ~(PAGE - 1);
  const uintptr_t last = (reinterpret_cast<uintptr_t>(codes) + bytes) & ~(PAGE - 1);
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_PAGEOUT);
#endif
}

// ---- Rows -------------------------------------------------------------------------------------------------------

// The operator RMSNormalization of a row.
inline void normalize(const Weights& weights, const float* from, float* to) {
  Vector squares = {};
  for (int64_t k = 0; k < weights.depth; k += LANES) squares += load(from + k) * load(from + k);
  const float mean = sum_of(squares) / weights.depth, factor = 1 / __builtin_sqrtf(mean + weights.epsilon);
  for (int64_t k = 0; k < weights.depth; k += LANES) store(to + k, load(from + k) * factor * load(weights.norm + k));
}

// What goes into an MLP's last product: up * silu(gate), of a row of gate and up [2 K].
inline void gate(const float* from, int64_t depth, float* to) {
  for (int64_t k = 0; k < depth; k += LANES) {
    const Vector x = load(from + k);
    store(to + k, load(from + depth + k) * (x / (1.f + exponential(smaller(-x, all(88.f))))));
  }
}

// Adds or subtracts the lane at a distance: a step of the Walsh-Hadamard transform within a vector.
template <int DISTANCE>
inline Vector butterfly(Vector x) {
  Vector sign;
  for (int lane = 0; lane < LANES; ++lane) sign[lane] = lane & DISTANCE ? -1.f : 1.f;
  return exchanged<DISTANCE>(x) + x * sign;
}

inline void rotate(const float* from, float* to) {
  Vector x[4];
  for (int i = 0; i < 4; ++i) {
    x[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(from + i * LANES)))));
  }
  const Vector a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
  store(to, (a + c) * 0.125f);
  store(to + LANES, (b + d) * 0.125f);
  store(to + 2 * LANES, (a - c) * 0.125f);
  store(to + 3 * LANES, (b - d) * 0.125f);
}

// Rounds a block of a row; returns the largest magnitude, over 127, and the sum of the codes.
inline float round_block(const float* from, int64_t count, int8_t* to, int32_t* sum) {
  Vector most = {};
  for (int64_t i = 0; i < count; i += LANES) {
    const Vector x = load(from + i);
    most = larger(most, larger(x, -x));
  }
  const float largest = largest_of(most), inverse = largest > 0 ? LARGEST_CODE / largest : 0;
  Integers sums = {};
  for (int64_t i = 0; i < count; i += LANES) {
    const Integers codes = to_integers(load(from + i) * inverse);
    sums += codes;
    store_bytes(to + i, codes);
  }
  *sum = sum_of(sums);
  return largest / LARGEST_CODE;
}

// Makes a row ready for the product, and lays its codes out as that reads them.
void round_row(void* given, size_t row) {
  Product& product = *static_cast<Product*>(given);
  const Weights& weights = *product.weights;
  const int64_t depth = weights.depth;
  void* memory;
  if (posix_memalign(&memory, sizeof(Vector), depth * (sizeof(float) + 1))) {
    product.failed = true;
    return;
  }
  float* changed = static_cast<float*>(memory);
  int8_t* rounded = static_cast<int8_t*>(memory) + depth * sizeof(float);
  const float* from = product.rows + row * depth * (1 + weights.gated);
  if (weights.normed || weights.gated) {
    weights.normed ? normalize(weights, from, changed) : gate(from, depth, changed);
    from = changed;
  }
  if (weights.rotated) {
    for (int64_t k = 0; k < depth; k += ROTATED) rotate(from + k, changed + k);
    from = changed;
  }
  const int64_t part = product.part_of(row), first = product.first_row(part), words = weights.words();
  const int64_t rows = product.first_row(part + 1) - first;
  int32_t* codes = product.codes + first * words + row - first;
  if (weights.bits < 32) {
    const int32_t zero = weights.bits == 8 ? 128 : 8;
    for (int64_t block = 0; block < weights.blocks; ++block) {
      const int64_t at = row * weights.blocks + block, k = block * weights.block;
      int32_t sum;
      product.scales[at] = round_block(from + k, weights.block, rounded + k, &sum);
      product.offsets[at] = -zero * sum;
    }
  }
  const char* ready = weights.bits < 32 ? reinterpret_cast<const char*>(rounded) : reinterpret_cast<const char*>(from);
  for (int64_t word = 0; word < words; ++word) memcpy(codes + word * rows, ready + 4 * word, 4);
  free(memory);
}

// ---- The product ------------------------------------------------------------------------------------------------

// 16 columns of ROWS rows.
template <int BITS, int ROWS>
void multiply(const Product& product, int64_t panel, int64_t row) {
  const Weights& weights = *product.weights;
  const int64_t depth = weights.depth, blocks = weights.blocks;
  const uint8_t* of_weights = weights.codes + panel * depth * LANES * BITS / 8;
  const int32_t* codes = product.codes + row * weights.words();
  Vector result[ROWS] = {};
  if constexpr (BITS == 32) {
    const float* numbers = reinterpret_cast<const float*>(codes);
    for (int64_t k = 0; k < depth; ++k) {
      const Vector some = load(reinterpret_cast<const float*>(of_weights));
      of_weights += sizeof(Vector);
      __builtin_prefetch(of_weights + AHEAD);
      for (int i = 0; i < ROWS; ++i) result[i] += some * numbers[i];
      numbers += ROWS;
    }
  } else {
    const float* scales = product.scales + row * blocks;
    const int32_t* offsets = product.offsets + row * blocks;
    for (int64_t block = 0; block < blocks; ++block) {
      Integers sums[ROWS];
      for (int i = 0; i < ROWS; ++i) sums[i] = Integers{} + offsets[i * blocks + block];
      for (int64_t k = 0; k < weights.block; k += 32 / BITS) {
        const ManyBytes some = *reinterpret_cast<const ManyBytes*>(of_weights);
        of_weights += sizeof(ManyBytes);
        __builtin_prefetch(of_weights + AHEAD);
        const ManyBytes low = BITS == 8 ? some : some & 15;
        for (int i = 0; i < ROWS; ++i) sums[i] = add_products(sums[i], low, codes[i]);
        codes += ROWS;
        if (BITS == 8) continue;
        const ManyBytes high = reinterpret_cast<ManyBytes>(reinterpret_cast<Integers>(some) >> 4) & 15;
        for (int i = 0; i < ROWS; ++i) sums[i] = add_products(sums[i], high, codes[i]);
        codes += ROWS;
      }
      const Vector of_columns = weights.scales_of(panel, block);
      for (int i = 0; i < ROWS; ++i) {
        result[i] += __builtin_convertvector(sums[i], Vector) * (of_columns * scales[i * blocks + block]);
      }
    }
  }
  const int64_t left = weights.width - panel * LANES, count = left < LANES ? left : LANES;
  for (int i = 0; i < ROWS; ++i) {
    const int64_t at = (row + i) * weights.width + panel * LANES;
    Vector added = {};
    if (product.added) memcpy(&added, product.added + at, count * sizeof(float));
    const Vector sum = result[i] + added;
    memcpy(product.result + at, &sum, count * sizeof(float));
  }
}

using Multiply = void (*)(const Product&, int64_t, int64_t);

// What multiplies so many rows: FIRST or more.
template <int BITS, int FIRST = 1>
Multiply multiply_rows(int64_t rows) {
  if constexpr (FIRST == MAX_ROWS) {
    return multiply<BITS, FIRST>;
  } else {
    return rows == FIRST ? multiply<BITS, FIRST> : multiply_rows<BITS, FIRST + 1>(rows);
  }
}

void multiply_panels(void* given, size_t unit) {
  const Product& product = *static_cast<const Product*>(given);
  const Weights& weights = *product.weights;
  const int64_t first = unit * product.panels_of_unit, behind = first + product.panels_of_unit;
  const int64_t last = behind < weights.panels ? behind : weights.panels;
  for (int64_t part = 0; part < product.parts; ++part) {
    const int64_t row = product.first_row(part), rows = product.first_row(part + 1) - row;
    const Multiply function = weights.bits == 32  ? multiply_rows<32>(rows)
                              : weights.bits == 8 ? multiply_rows<8>(rows)
                                                  : multiply_rows<4>(rows);
    for (int64_t panel = first; panel < last; ++panel) function(product, panel, row);
  }
}

OrtStatus* compute_product(void* kernel, OrtKernelContext* context) {
  const Weights& weights = *static_cast<const Weights*>(kernel);
  Tensor rows;
  TRY(read_input(context, 0, rows));
  if (!rows.rank || rows.shape[rows.rank - 1] != weights.depth * (1 + weights.gated)) {
    return create_status(INVALID_ARGUMENT, "product: expected rows that fit the columns of the weights");
  }
  Product product = {};
  product.weights = &weights;
  product.rows = static_cast<const float*>(rows.data);
  product.count = 1;
  for (size_t axis = 0; axis + 1 < rows.rank; ++axis) product.count *= rows.shape[axis];
  rows.shape[rows.rank - 1] = weights.width;
  void* result;
  TRY(make_output(context, 0, rows.shape, rows.rank, &result));
  product.result = static_cast<float*>(result);
  if (!product.count) return nullptr;
  if (weights.added) {
    Tensor added;
    TRY(read_input(context, 4, added));
    for (size_t axis = 0; axis < rows.rank; ++axis) {
      if (added.rank != rows.rank || added.shape[axis] != rows.shape[axis]) {
        return create_status(INVALID_ARGUMENT, "product: expected what is added in the shape of the result");
      }
    }
    product.added = static_cast<const float*>(added.data);
  }
  const int64_t words = product.count * weights.words(), blocks = product.count * weights.blocks;
  char* memory = static_cast<char*>(malloc(blocks * 8 + words * 4));
  if (!memory) return create_status(INVALID_ARGUMENT, "product: no memory for the rounded rows");
  product.scales = reinterpret_cast<float*>(memory);
  product.offsets = reinterpret_cast<int32_t*>(product.scales + blocks);
  product.codes = product.offsets + blocks;
  product.parts = (product.count + MAX_ROWS - 1) / MAX_ROWS;
  OrtStatus* failed = nullptr;
  if (product.count * weights.depth < SHARED_ROUNDING) {
    for (int64_t row = 0; row < product.count; ++row) round_row(&product, row);
  } else {
    failed = share(context, round_row, product.count, product);
  }
  if (!failed && product.failed) failed = create_status(INVALID_ARGUMENT, "product: no memory for a row");
  if (!failed) {
    product.panels_of_unit = (weights.panels + UNITS - 1) / UNITS;
    const int64_t units = (weights.panels + product.panels_of_unit - 1) / product.panels_of_unit;
    failed = share(context, multiply_panels, units, product);
  }
  free(memory);
  return failed;
}

void destroy_product(void* kernel) {
  Weights* weights = static_cast<Weights*>(kernel);
  free(weights->codes);
  free(weights->scales);
  free(weights->halves);
  free(weights->norm);
  free(weights);
}

// A constant input of the operator.
OrtStatus* read_constant(const OrtKernelInfo* info, size_t index, Tensor& tensor) {
  int is_constant;
  const OrtValue* value;
  TRY(constant_input(info, index, &is_constant, &value));
  if (!is_constant) return create_status(INVALID_ARGUMENT, "product: expected constant weights");
  return read_tensor(value, tensor);
}

// Inputs: rows [..., K]; the constants codes (the bytes of [K, N]), scales [K / block, N], which float32 has not, and
// norm [K], if rows are normed; and what is added to the result [..., N], if anything is.
// Attributes: bits; depth, which is K; width, which is N; and, 1 for yes, transposed, for weights [N, K] in float32;
// what is done before rows are rounded: normed, with its epsilon, gated, for rows of gate and up [..., 2 K], and
// rotated; and added.
OrtStatus* create_product(const OrtCustomOp*, OrtApi*, const OrtKernelInfo* info, void** kernel) {
  Weights weights = {};
  Tensor codes, scales;
  TRY(attribute_int(info, "bits", &weights.bits));
  TRY(attribute_int(info, "depth", &weights.depth));
  TRY(attribute_int(info, "width", &weights.width));
  TRY(attribute_int(info, "transposed", &weights.transposed));
  TRY(attribute_int(info, "normed", &weights.normed));
  TRY(attribute_float(info, "epsilon", &weights.epsilon));
  TRY(attribute_int(info, "gated", &weights.gated));
  TRY(attribute_int(info, "rotated", &weights.rotated));
  TRY(attribute_int(info, "added", &weights.added));
  TRY(read_constant(info, 1, codes));
  weights.blocks = 1;
  if (weights.bits < 32) {
    TRY(read_constant(info, 2, scales));
    weights.blocks = scales.shape[0];
    if (scales.shape[1] != weights.width) return create_status(INVALID_ARGUMENT, "product: the scales do not fit");
  }
  weights.block = weights.depth / weights.blocks;
  weights.panels = (weights.width + LANES - 1) / LANES;
  if (weights.block * weights.blocks != weights.depth || weights.block % 32 || weights.block > MAX_BLOCK) {
    return create_status(INVALID_ARGUMENT, "product: expected blocks of a multiple of 32 weights");
  }
  const int64_t given = weights.depth * weights.width * weights.bits / 8;
  if (codes.shape[0] != given) return create_status(INVALID_ARGUMENT, "product: the weights have another size");
  const size_t bytes = weights.panels * weights.depth * LANES * weights.bits / 8;
  Weights* kept = static_cast<Weights*>(calloc(1, sizeof(Weights)));
  weights.codes = static_cast<uint8_t*>(aligned_alloc(sizeof(Vector), bytes));
  weights.norm = static_cast<float*>(malloc(weights.depth * sizeof(float)));
  const bool has_scales = weights.bits == 32 || lay_out_scales(weights, static_cast<const float*>(scales.data));
  if (!kept || !weights.codes || !weights.norm || !has_scales) {
    return create_status(INVALID_ARGUMENT, "product: no memory for the weights");
  }
  if (weights.normed) {
    Tensor norm;
    TRY(read_constant(info, 3, norm));
    memcpy(weights.norm, norm.data, weights.depth * sizeof(float));
  }
  if (weights.bits == 32) {
    lay_out_floats(weights, static_cast<const float*>(codes.data));
  } else {
    lay_out_codes(weights, static_cast<const uint8_t*>(codes.data));
  }
  give_back(codes.data, given);
  memcpy(kept, &weights, sizeof(Weights));
  *kernel = kept;
  return nullptr;
}

}  // namespace
