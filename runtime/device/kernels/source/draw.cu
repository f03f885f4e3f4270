// Draws one token after every node, by the rules of export/step/acceptance.py.
//
// Thresholds are found in the logits' own order, four bits of a float at a time: the k-th largest logit by
// counting, the end of the nucleus by adding up weights. Nothing is sorted, and no sum depends on the order in
// which threads run.
#include "common.cuh"

// Tokens whose weights are added up first, as in the graph.
#define VOCABULARY_BLOCK 256
#define THREADS_OF_BLOCK 32
#define MIN_TEMPERATURE 1e-30f
#define MAX_TOP_K 1024
// Thresholds that one pass over the logits compares with, and the bits that these decide.
#define THRESHOLDS 15
#define THRESHOLD_BITS 4

struct DrawArguments
{
    const float *logits, *uniforms;              // [B, N, V], [B, P]
    const i64 *depths;                           // [B, N]
    const float *temperature, *top_p, *min_p;    // [B]
    const i64 *top_k;                            // [B]
    i64 *choices;                                // [B, N]
    float *log_probs;                            // [B, N], of the choices at temperature 1
    int num_nodes, num_places, vocab_size, reserved;
};

// How a token is weighed.
struct Weights
{
    float highest, warmth;
    u32 least_key; // of the tokens within top_k

    __device__ float score(float logit) const { return (logit - highest) / warmth; }
    __device__ float of(float logit) const { return ascending(logit) >= least_key ? expf(score(logit)) : 0.0f; }
};

struct Counted
{
    typedef int Number;
    __device__ int of(float logit) const { return 1; }
};

struct Weighed
{
    typedef float Number;
    Weights weights;
    __device__ float of(float logit) const { return weights.of(logit); }
};

// The sum of all threads' values, which every thread gets. The number of threads is a power of two.
static __device__ float total_of(float value, float *scratch)
{
    scratch[threadIdx.x] = value;
    __syncthreads();
    LOOP for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half)
            scratch[threadIdx.x] += scratch[threadIdx.x + half];
        __syncthreads();
    }
    float total = scratch[0];
    __syncthreads();
    return total;
}

// The best logit's key, and the first token that has it.
static __device__ u64 best_of(const float *logits, int vocab_size, u64 *scratch)
{
    u64 best = 0;
    EACH(i, vocab_size) {
        u64 key = key_of(ascending(logits[i]), i);
        best = key > best ? key : best;
    }
    scratch[threadIdx.x] = best;
    __syncthreads();
    LOOP for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half && scratch[threadIdx.x + half] > scratch[threadIdx.x])
            scratch[threadIdx.x] = scratch[threadIdx.x + half];
        __syncthreads();
    }
    best = scratch[0];
    __syncthreads();
    return best;
}

// The largest key from which on the tokens measure at least `needed`; 0 if all of them measure less.
template <typename Measure>
static __device__ u32 threshold(const float *logits, int vocab_size, Measure measure, typename Measure::Number needed)
{
    typedef typename Measure::Number Number;
    Number *sums = (Number *)shared_memory;
    u32 found = 0;
    LOOP for (int shift = 32 - THRESHOLD_BITS; shift >= 0; shift -= THRESHOLD_BITS) {
        Number own[THRESHOLDS];
        for (int j = 0; j < THRESHOLDS; j++)
            own[j] = 0;
        EACH(i, vocab_size) {
            float logit = logits[i];
            u32 key = ascending(logit);
            if (key < found + (1u << shift))
                continue;
            Number value = measure.of(logit);
            for (int j = 0; j < THRESHOLDS; j++)
                own[j] += key >= found + ((u32)(j + 1) << shift) ? value : 0;
        }
        for (int j = 0; j < THRESHOLDS; j++)
            sums[j * blockDim.x + threadIdx.x] = own[j];
        __syncthreads();
        LOOP for (int half = blockDim.x / 2; half > 0; half /= 2) {
            EACH(i, THRESHOLDS * half) {
                int at = i / half * blockDim.x + i % half;
                sums[at] += sums[at + half];
            }
            __syncthreads();
        }
        u32 base = found;
        for (int j = 0; j < THRESHOLDS; j++)
            if (sums[j * blockDim.x] >= needed)
                found = base + ((u32)(j + 1) << shift);
        __syncthreads();
    }
    return found;
}

// The first index with a weight at which the sum so far exceeds the target, or else the last with a weight.
// `before` becomes the sum of the weights before it.
static __device__ int first_above(const float *weights, int count, float target, float *before)
{
    float sum = 0.0f;
    int last = 0;
    LOOP for (int i = 0; i < count; i++) {
        if (!(weights[i] > 0.0f))
            continue;
        *before = sum;
        sum += weights[i];
        last = i;
        if (sum > target)
            break;
    }
    return last;
}

// The token at which the cumulative weight exceeds the share `uniform` of the whole, for the first thread alone.
template <typename Kept>
static __device__ int inverse_transform(const float *logits, int vocab_size, Kept kept, float uniform)
{
    int num_blocks = (vocab_size + VOCABULARY_BLOCK - 1) / VOCABULARY_BLOCK;
    int groups = blockDim.x / THREADS_OF_BLOCK, group = threadIdx.x / THREADS_OF_BLOCK;
    int lane = threadIdx.x % THREADS_OF_BLOCK;
    Cutter cutter = {(char *)shared_memory};
    float *parts = cutter.cut<float>(blockDim.x), *sums = cutter.cut<float>(num_blocks);
    float *weights = cutter.cut<float>(VOCABULARY_BLOCK);
    int *chosen = cutter.cut<int>(1);
    float *rest = cutter.cut<float>(1);
    LOOP for (int first = 0; first < num_blocks; first += groups) {
        float own = 0.0f;
        int end = least((first + group + 1) * VOCABULARY_BLOCK, vocab_size);
        LOOP for (int i = (first + group) * VOCABULARY_BLOCK + lane; i < end; i += THREADS_OF_BLOCK)
            own += kept.of(logits[i]);
        parts[threadIdx.x] = own;
        __syncthreads();
        if (lane == 0 && first + group < num_blocks) {
            float sum = 0.0f;
            LOOP for (int i = 0; i < THREADS_OF_BLOCK; i++)
                sum += parts[threadIdx.x + i];
            sums[first + group] = sum;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        float total = 0.0f, before = 0.0f;
        LOOP for (int i = 0; i < num_blocks; i++)
            total += sums[i];
        *chosen = first_above(sums, num_blocks, uniform * total, &before);
        *rest = uniform * total - before;
    }
    __syncthreads();
    int begin = *chosen * VOCABULARY_BLOCK;
    EACH(i, VOCABULARY_BLOCK)
        weights[i] = begin + i < vocab_size ? kept.of(logits[begin + i]) : 0.0f;
    __syncthreads();
    if (threadIdx.x == 0) {
        float before = 0.0f;
        return begin + first_above(weights, VOCABULARY_BLOCK, *rest, &before);
    }
    return begin;
}

// The weights of the tokens that all filters leave.
struct Kept
{
    Weights weights;
    u32 nucleus_end;
    float least_score;

    __device__ float of(float logit) const
    {
        bool is_kept = ascending(logit) >= nucleus_end && weights.score(logit) >= least_score;
        return is_kept ? weights.of(logit) : 0.0f;
    }
};

// Grid: nodes, sequences. The number of threads is a power of two from 32 on.
KERNEL(draw, DrawArguments)
{
    int b = blockIdx.y;
    i64 at = (i64)b * a.num_nodes + blockIdx.x;
    const float *logits = a.logits + at * a.vocab_size;
    float *scratch = (float *)shared_memory;
    int token = place_of(best_of(logits, a.vocab_size, shared_memory));
    float highest = logits[token];
    Weights plain = {highest, 1.0f, 0};
    float own = 0.0f;
    EACH(i, a.vocab_size)
        own += plain.of(logits[i]);
    float whole = total_of(own, scratch);
    float temperature = a.temperature[b], top_p = a.top_p[b];
    if (temperature != 0.0f) {
        Weights weights = {highest, larger(temperature, MIN_TEMPERATURE), 0};
        int most = least((int)a.top_k[b], least(MAX_TOP_K, a.vocab_size));
        if (most > 0)
            weights.least_key = threshold(logits, a.vocab_size, Counted(), most);
        Weighed measure = {weights};
        Kept kept = {weights, 0, logf(a.min_p[b])};
        if (top_p < 1.0f) {
            own = 0.0f;
            EACH(i, a.vocab_size)
                own += measure.of(logits[i]);
            kept.nucleus_end = threshold(logits, a.vocab_size, measure, top_p * total_of(own, scratch));
        }
        float uniform = a.uniforms[(i64)b * a.num_places + a.depths[at]];
        token = inverse_transform(logits, a.vocab_size, kept, uniform);
    }
    if (threadIdx.x == 0) {
        a.choices[at] = token;
        a.log_probs[at] = (logits[token] - highest) - logf(whole);
    }
}
