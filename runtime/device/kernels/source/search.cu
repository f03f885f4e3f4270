// From a lattice to a tree of the most probable prefixes: drafters/tree_search.py, one block for a sequence.
//
// The frames are read in order. Of each, every kept prefix emits every label; equal prefixes are merged, and
// the most probable are kept, best first. So the prefixes with a probability are always the first ones.
#include "tree.cuh"

// Prefixes whose label vectors are in shared memory at the same time: with 16 labels and the blank, almost as many
// products as a block of 512 has threads.
#define TILE 30
#define LEAST_REST 1e-30f

struct SearchArguments
{
    const i64 *frame_tokens;                                   // [B, T, K]
    const float *frame_logprobs, *blank_logprobs;              // [B, T, K], [B, T] or null
    // Of a transition: [B, T, r] or null, [B, r], [B, T, K, r], [B, T, num_following, r]. Null without one.
    const float *transition_frames, *transition_anchor, *transition_previous, *transition_following;
    const i64 *anchor_ids, *lengths;                           // [B]
    TreeOutputs out;
    int num_frames, num_labels, size, num_kept;                // T, K, nodes with the root, M
    int transition_size, num_following, merges_repeats, capacity;
};

// The kept prefixes. `place` is where the last label stands among the frames' labels, or behind them.
struct Prefixes
{
    float *probability, *ends_blank, *ends_label;
    int *token, *parent, *depth, *place;
};

static __device__ Prefixes cut_prefixes(Cutter &cutter, int count)
{
    Prefixes p;
    p.probability = cutter.cut<float>(count);
    p.ends_blank = cutter.cut<float>(count);
    p.ends_label = cutter.cut<float>(count);
    p.token = cutter.cut<int>(count);
    p.parent = cutter.cut<int>(count);
    p.depth = cutter.cut<int>(count);
    p.place = cutter.cut<int>(count);
    return p;
}

// What the block works with on one frame.
struct Frame
{
    int *labels;                                  // [K]
    float *logits;                                // [K + 1], the blank's last
    float *by_label;                              // [M, K + 1]: probabilities after a prefix, the blank's last
    float *emitted;                               // [M, K]
    float *inflow, *stays;                        // [M]
    float *hidden, *following;                    // [TILE, r + 1], [K + 1, r + 1]: no bank of memory twice in a row
    int *position;                                // [M]: where a kept prefix stands among the next ones
    int *num_active, *num_candidates;             // [1]
    u64 *keys;
};

// Probabilities after a label, normalised again together with the mass outside the candidates.
static __device__ void normalise(float *row, int count, float rest)
{
    float best = logf(rest), total = 0.0f;
    LOOP for (int k = 0; k < count; k++)
        best = larger(best, row[k]);
    LOOP for (int k = 0; k < count; k++) {
        row[k] = expf(row[k] - best);
        total += row[k];
    }
    total += rest * expf(-best);
    LOOP for (int k = 0; k < count; k++)
        row[k] /= total;
}

// Fills by_label for the first `active` prefixes.
static __device__ void label_probabilities(const SearchArguments &a, const Frame &f, const Prefixes &p, int b, int t, int active)
{
    int labels = a.num_labels, width = labels + (a.blank_logprobs != 0), r = a.transition_size;
    if (!a.transition_following) {
        EACH(i, active * (labels + 1)) {
            int k = i % (labels + 1);
            f.by_label[i] = k < width ? expf(f.logits[k]) : 0.0f;
        }
        __syncthreads();
        return;
    }
    float rest = 0.0f;
    LOOP for (int k = 0; k < width; k++)
        rest += expf(f.logits[k]);
    rest = larger(1.0f - rest, LEAST_REST);
    i64 frame = (i64)b * a.num_frames + t;
    const float *following = a.transition_following + frame * a.num_following * r;
    EACH(i, a.num_following * r)
        f.following[i / r * (r + 1) + i % r] = following[i];
    LOOP for (int first = 0; first < active; first += TILE) {
        int count = least(TILE, active - first);
        EACH(i, count * r) {
            int place = p.place[first + i / r], column = i % r;
            float x = place == a.num_frames * labels
                          ? a.transition_anchor[(i64)b * r + column]
                          : a.transition_previous[((i64)b * a.num_frames * labels + place) * r + column];
            if (a.transition_frames) {
                x += a.transition_frames[frame * r + column];
                x = x / (1.0f + expf(-x));
            }
            f.hidden[i / r * (r + 1) + column] = x;
        }
        __syncthreads();
        EACH(i, count * (labels + 1)) {
            int m = i / (labels + 1), k = i % (labels + 1);
            float change = 0.0f;
            if (k < a.num_following)
#pragma unroll 4
                for (int column = 0; column < r; column++)
                    change += f.hidden[m * (r + 1) + column] * f.following[k * (r + 1) + column];
            f.by_label[(first + m) * (labels + 1) + k] = k < width ? f.logits[k] + change : 0.0f;
        }
        __syncthreads();
    }
    EACH(m, active)
        normalise(f.by_label + m * (labels + 1), width, rest);
    __syncthreads();
}

// Emits the frame's labels after every prefix, and lets mass flow into prefixes that are kept already.
static __device__ void emit(const SearchArguments &a, const Frame &f, const Prefixes &p, int active)
{
    int labels = a.num_labels;
    EACH(i, active * labels) {
        int m = i / labels, k = i % labels;
        float mass = p.ends_blank[m] + p.ends_label[m], by_label = f.by_label[m * (labels + 1) + k];
        // The last label again is a new one only after a blank.
        if (a.merges_repeats && p.token[m] == f.labels[k])
            mass = p.ends_blank[m];
        f.emitted[i] = mass * by_label;
    }
    __syncthreads();
    EACH(m, active) {
        int k = 0;
        while (k < labels && f.labels[k] != p.token[m])
            k++;
        f.stays[m] = f.inflow[m] = 0.0f;
        if (k == labels)
            continue;
        if (a.merges_repeats)
            f.stays[m] = f.by_label[m * (labels + 1) + k] * p.ends_label[m];
        if (p.parent[m] >= 0) {
            // No other prefix has this parent and this label, so no other thread reads what is taken here.
            float *from_parent = f.emitted + p.parent[m] * labels + k;
            f.inflow[m] = *from_parent;
            *from_parent = 0.0f;
        }
    }
    __syncthreads();
}

static __device__ __forceinline__ u64 scored(float probability, int depth, int place)
{
    // A prefix never ranks before its parent, even if rounding makes it as probable.
    float score = probability > 0.0f ? probability * (1.0f - LEVEL_DISCOUNT * (float)depth) : 0.0f;
    return key_of((u32)__float_as_int(score), place);
}

// The best of the kept prefixes and the new ones become `next`.
static __device__ void keep_best(const SearchArguments &a, const Frame &f, const Prefixes &p, const Prefixes &next, int t, int active)
{
    int labels = a.num_labels, kept = a.num_kept, count = 1;
    EACH(i, active)
        f.keys[i] = scored(p.probability[i] + f.inflow[i], p.depth[i], i);
    EACH(m, kept)
        f.position[m] = 0;
    if (threadIdx.x == 0)
        *f.num_candidates = active;
    __syncthreads();
    // Where all places are taken, a new prefix has to score above the worst kept one. Few do.
    u64 worst = active < kept ? 0 : f.keys[0] >> 32;
    LOOP for (int i = 1; i < active && active == kept; i++)
        worst = f.keys[i] >> 32 < worst ? f.keys[i] >> 32 : worst;
    EACH(i, active * labels) {
        u64 key = scored(f.emitted[i], p.depth[i / labels] + 1, active + i);
        // The keys differ, so the order in which they come here does not matter.
        if (key >> 32 > worst)
            f.keys[atomicAdd(f.num_candidates, 1)] = key;
    }
    __syncthreads();
    int candidates = *f.num_candidates;
    while (count < candidates)
        count *= 2;
    EACH(i, count - candidates)
        f.keys[candidates + i] = 0;
    __syncthreads();
    sort_descending(f.keys, count);
    EACH(i, least(kept, count)) {
        bool is_last = i + 1 == least(kept, count) || f.keys[i + 1] >> 32 == 0;
        if (f.keys[i] >> 32 == 0)
            continue;
        if (place_of(f.keys[i]) < active)
            f.position[place_of(f.keys[i])] = i;
        if (is_last)
            *f.num_active = i + 1;
    }
    __syncthreads();
    EACH(i, *f.num_active) {
        int chosen = place_of(f.keys[i]);
        if (chosen < active) {
            float mass = p.ends_blank[chosen] + p.ends_label[chosen];
            next.probability[i] = p.probability[chosen] + f.inflow[chosen];
            next.ends_blank[i] = mass * f.by_label[chosen * (labels + 1) + labels];
            next.ends_label[i] = f.stays[chosen] + f.inflow[chosen];
            next.token[i] = p.token[chosen];
            next.parent[i] = p.parent[chosen] >= 0 ? f.position[p.parent[chosen]] : NO_PARENT;
            next.depth[i] = p.depth[chosen];
            next.place[i] = p.place[chosen];
            continue;
        }
        int m = (chosen - active) / labels, k = (chosen - active) % labels;
        float emitted = f.emitted[chosen - active];
        next.probability[i] = emitted;
        next.ends_blank[i] = 0.0f;
        next.ends_label[i] = emitted;
        next.token[i] = f.labels[k];
        next.parent[i] = f.position[m];
        next.depth[i] = p.depth[m] + 1;
        next.place[i] = t * labels + k;
    }
    __syncthreads();
}

// Grid: the first block of a sequence searches, the others write the mask of the text; sequences.
KERNEL(search, SearchArguments)
{
    int b = blockIdx.y;
    i64 length = a.lengths[b];
    if (writes_text_mask(a.out.attn_mask, b, a.size, a.capacity, length))
        return;
    int labels = a.num_labels, kept = a.num_kept, r = a.transition_size;
    Cutter cutter = {(char *)shared_memory};
    Frame f;
    Nodes nodes = cut_nodes(cutter, a.size);
    Prefixes p = cut_prefixes(cutter, kept), next = cut_prefixes(cutter, kept);
    f.labels = cutter.cut<int>(labels);
    f.logits = cutter.cut<float>(labels + 1);
    f.by_label = cutter.cut<float>(kept * (labels + 1));
    f.emitted = cutter.cut<float>(kept * labels);
    f.inflow = cutter.cut<float>(kept);
    f.stays = cutter.cut<float>(kept);
    f.position = cutter.cut<int>(kept);
    f.num_active = cutter.cut<int>(1);
    f.num_candidates = cutter.cut<int>(1);
    f.hidden = cutter.cut<float>(TILE * (r + 1));
    f.following = cutter.cut<float>(a.num_following * (r + 1));
    f.keys = cutter.cut<u64>(0);
    if (threadIdx.x == 0) {
        p.probability[0] = p.ends_blank[0] = 1.0f;
        p.ends_label[0] = 0.0f;
        // No label is the root's, so that its own token may follow it.
        p.token[0] = p.parent[0] = -1;
        p.depth[0] = 0;
        p.place[0] = a.num_frames * labels;
        *f.num_active = 1;
    }
    LOOP for (int t = 0; t < a.num_frames; t++) {
        i64 frame = (i64)b * a.num_frames + t;
        EACH(k, labels) {
            f.labels[k] = (int)a.frame_tokens[frame * labels + k];
            f.logits[k] = a.frame_logprobs[frame * labels + k];
        }
        if (a.blank_logprobs && threadIdx.x == 0)
            f.logits[labels] = a.blank_logprobs[frame];
        __syncthreads();
        int active = *f.num_active;
        label_probabilities(a, f, p, b, t, active);
        emit(a, f, p, active);
        keep_best(a, f, p, next, t, active);
        Prefixes last = p;
        p = next;
        next = last;
    }
    __syncthreads();
    EACH(i, a.size) {
        bool is_prefix = i < *f.num_active, is_draft = is_prefix && i > 0;
        nodes.token[i] = is_draft ? p.token[i] : (int)a.anchor_ids[b];
        nodes.parent[i] = is_draft ? p.parent[i] : NO_PARENT;
        nodes.depth[i] = is_draft ? p.depth[i] : 0;
        float log_prob = is_prefix ? logf(p.probability[i]) : -infinity();
        nodes.log_prob[i] = log_prob > 0.0f ? 0.0f : log_prob;
    }
    __syncthreads();
    write_tree(a.out, nodes, a.size, b, length, a.capacity);
}
