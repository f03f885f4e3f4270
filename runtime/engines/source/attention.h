// TreeAttention and RotaryTreeAttention: the attention of a layer with its cache.
//
// A row has the same bits however many rows are computed beside it and wherever its keys lie:
//   - a score is a sum over the head's size in a fixed order, and depends on nothing but its query and its key;
//   - the largest score does not depend on the order of the keys;
//   - weights and weighted values are added up one key after the other, in the order of the cache, and a key that
//     the mask hides adds exactly 0. The keys of a tree's path lie in the order of their depths.
// So a path has the bits of plain decoding in every tree, batch and chunk of a prompt, and there is no block of
// keys over whose end a tree may not reach.

#pragma once

#include <cstdlib>
#include <cstring>

#include "onnxruntime.h"
#include "vectors.h"

namespace {

// Queries whose scores are computed before the weighted values of the first, and keys whose values they share.
constexpr int MAX_QUERIES = 32, SHARED_KEYS = 64;
// Units into which a pass is cut for threads to have equal shares, and queries that a unit has at least for that.
constexpr int LEAST_UNITS = 16, LEAST_QUERIES = 4;
// Multiplications from which threads share a pass.
constexpr int64_t PARALLEL_FROM = 1 << 16;

struct Attributes {
  int64_t num_heads, num_kv_heads;
  float scale, softcap;  // softcap is 0 for none
};

struct Heads {  // rows of heads: [B, N, H, D] or [B, H, N, D], by what lies between two of each
  const float* data;
  int64_t of_batch, of_head, of_row;
  const float* at(int64_t batch, int64_t head, int64_t row) const {
    return data + batch * of_batch + head * of_head + row * of_row;
  }
};

struct Pass {
  Attributes attributes;
  int64_t batch, rows, new_keys, capacity, head_size;  // rows: of queries; new_keys: of keys
  Heads query, key, value;
  const float *cosines, *sines;  // [B, N, D / 2]; null where heads are rotated already
  const bool* mask;              // [B, 1, N, S]
  const int64_t* write_index;    // [B]
  float *keys, *values;          // [B, KH, S, D]
  float* result;                 // [B, N, H * D]
  int64_t groups, queries_of_unit, units_of_head;
  bool failed;
};

// A head's row, rotated as the operator RotaryEmbedding does where there are angles, and scaled.
void turn(const Pass& pass, const float* from, int64_t batch, int64_t row, float scale, float* to) {
  const int64_t size = pass.head_size, half = size / 2;
  if (!pass.cosines) {
    for (int64_t i = 0; i < size; ++i) to[i] = from[i] * scale;
    return;
  }
  const float* cosine = pass.cosines + (batch * pass.rows + row) * half;
  const float* sine = pass.sines + (batch * pass.rows + row) * half;
  for (int64_t i = 0; i < half; ++i) {
    const float first = from[i], second = from[i + half];
    to[i] = __builtin_fmaf(first, cosine[i], -(second * sine[i])) * scale;
    to[i + half] = __builtin_fmaf(first, sine[i], second * cosine[i]) * scale;
  }
}

// The scores of QUERIES neighbouring queries, 1 or 2, for 16 / QUERIES keys: those of the first query come first.
// The sum of a lane does not depend on which lane it is.
template <int VECTORS, int QUERIES>
inline Vector scores_of(const float* queries, const float* const* keys) {
  constexpr int KEYS = LANES / QUERIES;
  Vector parts[LANES];
  for (int key = 0; key < KEYS; ++key) {
    for (int i = 0; i < VECTORS; ++i) {
      Vector of_key = load(keys[key] + i * LANES);
      // The compiler would load it once for every query.
      if (QUERIES > 1) asm("" : "+v"(of_key));
      for (int query = 0; query < QUERIES; ++query) {
        Vector& part = parts[query * KEYS + key];
        const Vector of_query = load(queries + (query * VECTORS + i) * LANES);
        part = i ? part + of_query * of_key : of_query * of_key;
      }
    }
  }
  return sums(parts);
}

// Adds the values of some keys, times their weights, to the sums of COUNT queries, and the weights to their totals.
template <int VECTORS, int COUNT>
inline void add_values(
    const float* weights, int64_t stride, const float* values, int64_t count, float* added, Vector* totals) {
  Vector sum[COUNT][VECTORS], total[COUNT];
  for (int query = 0; query < COUNT; ++query) {
    total[query] = totals[query];
    for (int i = 0; i < VECTORS; ++i) sum[query][i] = load(added + (query * VECTORS + i) * LANES);
  }
  for (int64_t key = 0; key < count; ++key) {
    Vector value[VECTORS];
    for (int i = 0; i < VECTORS; ++i) {
      value[i] = load(values + (key * VECTORS + i) * LANES);
      // The compiler would load it once for every query.
      if (COUNT > 1) asm("" : "+v"(value[i]));
    }
    for (int query = 0; query < COUNT; ++query) {
      const Vector weight = all(weights[query * stride + key]);
      total[query] += weight;
      for (int i = 0; i < VECTORS; ++i) sum[query][i] += weight * value[i];
    }
  }
  for (int query = 0; query < COUNT; ++query) {
    totals[query] = total[query];
    for (int i = 0; i < VECTORS; ++i) store(added + (query * VECTORS + i) * LANES, sum[query][i]);
  }
}

// The same for ``queries`` of them, COUNT or fewer.
template <int VECTORS, int COUNT>
inline void add_rest(
    int64_t queries, const float* weights, int64_t stride, const float* values, int64_t count, float* added,
    Vector* totals) {
  if constexpr (COUNT > 0) {
    if (queries == COUNT) {
      add_values<VECTORS, COUNT>(weights, stride, values, count, added, totals);
    } else {
      add_rest<VECTORS, COUNT - 1>(queries, weights, stride, values, count, added, totals);
    }
  }
}

// Attention of the queries [first, last) of a key head: query q is row q / groups of head q % groups of the group.
template <int VECTORS>
void attend(Pass& pass, int64_t batch, int64_t kv_head, int64_t first, int64_t last) {
  constexpr int SIZE = VECTORS * LANES;
  // As many queries at a time as their sums fit into the registers.
  constexpr int AT_ONCE = VECTORS <= 4 ? 4 : VECTORS <= 8 ? 2 : 1;
  const Attributes& attributes = pass.attributes;
  const int64_t capacity = pass.capacity, first_row = first / pass.groups, last_row = (last - 1) / pass.groups;
  const bool* mask = pass.mask + batch * pass.rows * capacity;
  // The keys that any of the rows sees.
  int64_t begin = capacity, end = 0;
  for (int64_t row = first_row; row <= last_row; ++row) {
    const bool* seen = mask + row * capacity;
    const void* found = memchr(seen, 1, capacity);
    if (!found) continue;
    const int64_t from = static_cast<const bool*>(found) - seen;
    begin = from < begin ? from : begin;
    const int64_t to = static_cast<const bool*>(memrchr(seen, 1, capacity)) - seen + 1;
    end = to > end ? to : end;
  }
  const int64_t stride = end > begin ? (end - begin + LANES - 1) / LANES * LANES : 0;
  const int64_t count = last - first;
  const size_t floats = count * (SIZE * 2 + LANES + stride);
  void* memory = nullptr;
  if (posix_memalign(&memory, sizeof(Vector), floats * sizeof(float) + sizeof(Vector))) {
    pass.failed = true;
    return;
  }
  Vector* totals = static_cast<Vector*>(memory);
  float* queries = static_cast<float*>(memory) + count * LANES;
  float* added = queries + count * SIZE;
  float* scores = added + count * SIZE;
  memset(totals, 0, count * sizeof(Vector));
  memset(added, 0, count * SIZE * sizeof(float));
  for (int64_t index = 0; index < count; ++index) {
    const int64_t query = first + index, head = kv_head * pass.groups + query % pass.groups;
    const int64_t row = query / pass.groups;
    turn(pass, pass.query.at(batch, head, row), batch, row, attributes.scale, queries + index * SIZE);
  }
  const float* keys = pass.keys + (batch * attributes.num_kv_heads + kv_head) * capacity * SIZE;
  const float* values = pass.values + (batch * attributes.num_kv_heads + kv_head) * capacity * SIZE;
  for (int64_t place = 0; place < stride; place += LANES) {
    const float* of_keys[LANES];
    for (int lane = 0; lane < LANES; ++lane) {
      // Beyond the last key that is seen any key does: its weight becomes 0.
      const int64_t key = begin + place + lane;
      of_keys[lane] = keys + (key < end ? key : end - 1) * SIZE;
      for (int i = 0; i < VECTORS; ++i) __builtin_prefetch(of_keys[lane] + (LANES * VECTORS + i) * LANES);
    }
    int64_t index = 0;
    for (; index + 2 <= count; index += 2) {
      float* to = scores + index * stride + place;
      for (int half = 0; half < LANES; half += LANES / 2) {
        const Vector both = scores_of<VECTORS, 2>(queries + index * SIZE, of_keys + half);
        memcpy(to + half, &both, sizeof(both) / 2);
        memcpy(to + stride + half, reinterpret_cast<const char*>(&both) + sizeof(both) / 2, sizeof(both) / 2);
      }
    }
    if (index < count) {
      store(scores + index * stride + place, scores_of<VECTORS, 1>(queries + index * SIZE, of_keys));
    }
  }
  for (int64_t index = 0; index < count; ++index) {
    const bool* seen = mask + (first + index) / pass.groups * capacity + begin;
    float* weights = scores + index * stride;
    Vector largest = all(-3e38f);
    for (int64_t place = 0; place < stride; place += LANES) {
      const int64_t left = end - begin - place;
      const Integers is_seen = __builtin_convertvector(load_bytes(seen + place, left), Integers) != 0;
      Vector score = load(weights + place);
      if (attributes.softcap != 0) score = capped(score, attributes.softcap);
      score = is_seen ? score : all(-3e38f);
      largest = larger(largest, score);
      store(weights + place, score);
    }
    const float most = largest_of(largest);
    for (int64_t place = 0; place < stride; place += LANES) {
      const Vector score = load(weights + place);
      store(weights + place, score > -2e38f ? exponential(score - most) : all(0.f));
    }
  }
  for (int64_t place = 0; place < end - begin; place += SHARED_KEYS) {
    const int64_t left = end - begin - place, num_keys = left < SHARED_KEYS ? left : SHARED_KEYS;
    const float* from = values + (begin + place) * SIZE;
    int64_t index = 0;
    for (; index + AT_ONCE <= count; index += AT_ONCE) {
      add_values<VECTORS, AT_ONCE>(
          scores + index * stride + place, stride, from, num_keys, added + index * SIZE, totals + index);
    }
    if (index < count) {
      add_rest<VECTORS, AT_ONCE - 1>(
          count - index, scores + index * stride + place, stride, from, num_keys, added + index * SIZE, totals + index);
    }
  }
  for (int64_t index = 0; index < count; ++index) {
    const int64_t query = first + index, head = kv_head * pass.groups + query % pass.groups;
    const int64_t row = batch * pass.rows + query / pass.groups;
    float* to = pass.result + (row * attributes.num_heads + head) * SIZE;
    const float total = totals[index][0];
    for (int i = 0; i < SIZE; ++i) to[i] = total > 0 ? added[index * SIZE + i] / total : 0;
  }
  free(memory);
}

template <int VECTORS>
void run_unit(void* given, size_t unit) {
  Pass& pass = *static_cast<Pass*>(given);
  const int64_t of_head = unit % pass.units_of_head, head = unit / pass.units_of_head;
  const int64_t queries = pass.rows * pass.groups, first = of_head * pass.queries_of_unit;
  const int64_t last = first + pass.queries_of_unit < queries ? first + pass.queries_of_unit : queries;
  attend<VECTORS>(
      pass, head / pass.attributes.num_kv_heads, head % pass.attributes.num_kv_heads, first, last);
}

// What computes a unit, by the vectors of a head.
void (*const UNIT_FUNCTIONS[])(void*, size_t) = {
    nullptr,      run_unit<1>,  run_unit<2>,  run_unit<3>,  run_unit<4>,  run_unit<5>,  run_unit<6>, run_unit<7>,
    run_unit<8>,  run_unit<9>,  run_unit<10>, run_unit<11>, run_unit<12>, run_unit<13>, run_unit<14>,
    run_unit<15>, run_unit<16>};
constexpr int64_t MAX_VECTORS = sizeof(UNIT_FUNCTIONS) / sizeof(UNIT_FUNCTIONS[0]) - 1;

// Writes the keys and values of the pass into the caches.
void write_cache(const Pass& pass) {
  const int64_t size = pass.head_size, kv_heads = pass.attributes.num_kv_heads;
  for (int64_t batch = 0; batch < pass.batch; ++batch) {
    for (int64_t head = 0; head < kv_heads; ++head) {
      for (int64_t row = 0; row < pass.new_keys; ++row) {
        const int64_t at = ((batch * kv_heads + head) * pass.capacity + pass.write_index[batch] + row) * size;
        turn(pass, pass.key.at(batch, head, row), batch, row, 1.f, pass.keys + at);
        memcpy(pass.values + at, pass.value.at(batch, head, row), size * sizeof(float));
      }
    }
  }
}

OrtStatus* run(Pass& pass, OrtKernelContext* context) {
  for (int64_t batch = 0; batch < pass.batch; ++batch) {
    const int64_t start = pass.write_index[batch];
    if (start < 0 || start + pass.new_keys > pass.capacity) {
      return create_status(INVALID_ARGUMENT, "write_index: the rows of a pass must fit into the cache");
    }
  }
  write_cache(pass);
  pass.groups = pass.attributes.num_heads / pass.attributes.num_kv_heads;
  const int64_t queries = pass.rows * pass.groups, heads = pass.batch * pass.attributes.num_kv_heads;
  pass.units_of_head = (queries + MAX_QUERIES - 1) / MAX_QUERIES;
  const int64_t wanted = (LEAST_UNITS + heads - 1) / heads, most = (queries + LEAST_QUERIES - 1) / LEAST_QUERIES;
  if (pass.units_of_head < wanted) pass.units_of_head = wanted < most ? wanted : most;
  pass.queries_of_unit = (queries + pass.units_of_head - 1) / pass.units_of_head;
  pass.units_of_head = (queries + pass.queries_of_unit - 1) / pass.queries_of_unit;
  const int64_t units = heads * pass.units_of_head;
  void (*unit)(void*, size_t) = UNIT_FUNCTIONS[pass.head_size / LANES];
  int64_t longest = 0;
  for (int64_t batch = 0; batch < pass.batch; ++batch) {
    const int64_t length = pass.write_index[batch] + pass.new_keys;
    longest = length > longest ? length : longest;
  }
  if (units == 1 || heads * queries * longest * pass.head_size < PARALLEL_FROM) {
    for (int64_t index = 0; index < units; ++index) unit(&pass, index);
  } else {
    TRY(share(context, unit, units, pass));
  }
  return pass.failed ? create_status(INVALID_ARGUMENT, "attention: no memory for the scores of a pass") : nullptr;
}

// The cache after the pass, which is the cache before it where an engine binds both to the same memory.
OrtStatus* write_present(OrtKernelContext* context, size_t index, const Tensor& past, float** present) {
  void* data;
  TRY(make_output(context, index, past.shape, past.rank, &data));
  if (data != past.data) {
    memcpy(data, past.data, past.shape[0] * past.shape[1] * past.shape[2] * past.shape[3] * sizeof(float));
  }
  *present = static_cast<float*>(data);
  return nullptr;
}

// The places of inputs that both operators have, behind three of their own.
enum { MASK = 3, WRITE_INDEX, PAST_KEY, PAST_VALUE, NUM_INPUTS };

// Makes the outputs and computes the pass, of which ``batch``, ``rows``, ``head_size`` and the heads are known.
OrtStatus* compute_pass(OrtKernelContext* context, const Tensor* inputs, Pass& pass) {
  const Tensor &mask = inputs[MASK], &write_index = inputs[WRITE_INDEX];
  const Tensor &past_key = inputs[PAST_KEY], &past_value = inputs[PAST_VALUE];
  pass.capacity = past_key.shape[2];
  if (past_key.shape[0] != pass.batch || past_key.shape[1] != pass.attributes.num_kv_heads ||
      past_key.shape[3] != pass.head_size || mask.shape[0] != pass.batch || mask.shape[2] != pass.rows ||
      mask.shape[3] != pass.capacity || write_index.shape[0] != pass.batch) {
    return create_status(INVALID_ARGUMENT, "attention: the shapes of mask, caches and heads do not fit");
  }
  if (pass.head_size % LANES || pass.head_size > MAX_VECTORS * LANES) {
    return create_status(INVALID_ARGUMENT, "attention: expected a head size of 16, 32, ... or 256");
  }
  pass.mask = static_cast<const bool*>(mask.data);
  pass.write_index = static_cast<const int64_t*>(write_index.data);
  const int64_t shape[3] = {pass.batch, pass.rows, pass.attributes.num_heads * pass.head_size};
  void* data;
  TRY(make_output(context, 0, shape, 3, &data));
  pass.result = static_cast<float*>(data);
  TRY(write_present(context, 1, past_key, &pass.keys));
  TRY(write_present(context, 2, past_value, &pass.values));
  return run(pass, context);
}

// Inputs: query [B, H, N, D], key and value [B, KH, M, D], mask, write_index, past_key, past_value. The M rows may be
// more than the N whose attention is computed: a draft head writes the context to the cache in the pass of its frames.
OrtStatus* compute_tree_attention(void* kernel, OrtKernelContext* context) {
  Pass pass = {};
  pass.attributes = *static_cast<const Attributes*>(kernel);
  Tensor inputs[NUM_INPUTS];
  TRY(read_inputs(context, inputs));
  const Tensor &query = inputs[0], &key = inputs[1], &value = inputs[2];
  const int64_t rows = query.shape[2], size = query.shape[3], kv_heads = pass.attributes.num_kv_heads;
  const int64_t new_keys = key.shape[2];
  if (value.shape[2] != new_keys) {
    return create_status(INVALID_ARGUMENT, "attention: the shapes of keys and values do not fit");
  }
  pass.batch = query.shape[0], pass.rows = rows, pass.new_keys = new_keys, pass.head_size = size;
  pass.query = {static_cast<const float*>(query.data), pass.attributes.num_heads * rows * size, rows * size, size};
  pass.key = {static_cast<const float*>(key.data), kv_heads * new_keys * size, new_keys * size, size};
  pass.value = {static_cast<const float*>(value.data), kv_heads * new_keys * size, new_keys * size, size};
  return compute_pass(context, inputs, pass);
}

// Inputs: queries, keys and values of all heads side by side [B, N, (H + 2 KH) * D], cosines and sines
// [B, N, D / 2] by which queries and keys are rotated, mask, write_index, past_key, past_value.
OrtStatus* compute_rotary_tree_attention(void* kernel, OrtKernelContext* context) {
  Pass pass = {};
  pass.attributes = *static_cast<const Attributes*>(kernel);
  Tensor inputs[NUM_INPUTS];
  TRY(read_inputs(context, inputs));
  const Tensor &heads = inputs[0], &cosines = inputs[1], &sines = inputs[2];
  const int64_t num_heads = pass.attributes.num_heads, kv_heads = pass.attributes.num_kv_heads;
  const int64_t width = heads.shape[2], size = width / (num_heads + 2 * kv_heads);
  pass.batch = heads.shape[0], pass.rows = pass.new_keys = heads.shape[1], pass.head_size = size;
  if (cosines.shape[0] != pass.batch || cosines.shape[1] != pass.rows || cosines.shape[2] != size / 2) {
    return create_status(INVALID_ARGUMENT, "attention: the shapes of cosines and heads do not fit");
  }
  const float* data = static_cast<const float*>(heads.data);
  pass.query = {data, pass.rows * width, size, width};
  pass.key = {data + num_heads * size, pass.rows * width, size, width};
  pass.value = {data + (num_heads + kv_heads) * size, pass.rows * width, size, width};
  pass.cosines = static_cast<const float*>(cosines.data);
  pass.sines = static_cast<const float*>(sines.data);
  return compute_pass(context, inputs, pass);
}

OrtStatus* create_attention(const OrtCustomOp*, OrtApi*, const OrtKernelInfo* info, void** kernel) {
  Attributes attributes;
  TRY(attribute_int(info, "num_heads", &attributes.num_heads));
  TRY(attribute_int(info, "num_kv_heads", &attributes.num_kv_heads));
  TRY(attribute_float(info, "scale", &attributes.scale));
  TRY(attribute_float(info, "softcap", &attributes.softcap));
  if (attributes.num_kv_heads < 1 || attributes.num_heads % attributes.num_kv_heads) {
    return create_status(INVALID_ARGUMENT, "attention: num_heads is no multiple of num_kv_heads");
  }
  void* memory = malloc(sizeof(Attributes));
  if (!memory) return create_status(INVALID_ARGUMENT, "attention: no memory");
  memcpy(memory, &attributes, sizeof(Attributes));
  *kernel = memory;
  return nullptr;
}

}  // namespace
