// From the children of all passes of an autoregressive head to a tree: export/step/levels.py.
#include "tree.cuh"

#define MAX_LEVELS 32

struct Level
{
    const i64 *tokens;          // [B, W, K]
    const float *log_probs;     // [B, W, K]
    const float *scores;        // [B, W]; null for the root
    const i64 *chosen;          // [B, W]; null for the root
};

struct LevelsArguments
{
    const i64 *anchor_ids, *lengths;    // [B]
    TreeOutputs out;
    int num_levels, width, beam_width, size, capacity, reserved; // D, K, M, nodes with the root
    Level levels[MAX_LEVELS];
};

// A candidate: which level's, which parent among the nodes of that level's pass, which of its children.
struct Candidate
{
    int level, parent, rank;
};

static __device__ Candidate candidate_of(int place, const LevelsArguments &a)
{
    if (place < a.width)
        return {0, 0, place};
    place -= a.width;
    int of_level = a.beam_width * a.width;
    return {1 + place / of_level, place % of_level / a.width, place % a.width};
}

static __device__ float score_of(const Candidate &c, const LevelsArguments &a, int b)
{
    const Level &level = a.levels[c.level];
    int nodes = c.level ? a.beam_width : 1;
    float log_prob = level.log_probs[((i64)b * nodes + c.parent) * a.width + c.rank];
    // Rounding may leave a certain child a hair above 0, hence above its parent.
    log_prob = log_prob < MISSING ? MISSING : log_prob > 0.0f ? 0.0f : log_prob;
    return c.level ? level.scores[(i64)b * nodes + c.parent] + log_prob : log_prob;
}

// Grid: the first block of a sequence chooses, the others write the mask of the text; sequences.
KERNEL(search_levels, LevelsArguments)
{
    int b = blockIdx.y;
    i64 length = a.lengths[b];
    if (writes_text_mask(a.out.attn_mask, b, a.size, a.capacity, length))
        return;
    Cutter cutter = {(char *)shared_memory};
    Nodes nodes = cut_nodes(cutter, a.size);
    u64 *keys = cutter.cut<u64>(0);
    int total = a.width + (a.num_levels - 1) * a.beam_width * a.width, count = 1;
    while (count < total)
        count *= 2;
    EACH(i, count) {
        keys[i] = 0;
        if (i >= total)
            continue;
        Candidate c = candidate_of(i, a);
        float score = score_of(c, a, b);
        // Every level takes a share off, larger than rounding is, so that a kept node never loses its parent.
        keys[i] = key_of(ascending(score - LEVEL_DISCOUNT * (float)(c.level + 1) * (1.0f - score)), i);
    }
    __syncthreads();
    sort_descending(keys, count);
    EACH(i, a.size) {
        nodes.token[i] = (int)a.anchor_ids[b];
        nodes.parent[i] = NO_PARENT;
        nodes.depth[i] = 0;
        nodes.log_prob[i] = i ? -infinity() : 0.0f;
        if (i == 0 || i > total)
            continue;
        Candidate c = candidate_of(place_of(keys[i - 1]), a);
        float score = score_of(c, a, b);
        if (!(score > MISSING / 2))
            continue;
        int passes = c.level ? a.beam_width : 1;
        i64 child = ((i64)b * passes + c.parent) * a.width + c.rank;
        nodes.token[i] = (int)a.levels[c.level].tokens[child];
        nodes.depth[i] = c.level + 1;
        nodes.log_prob[i] = score;
        nodes.parent[i] = 0;
        if (c.level == 0)
            continue;
        // Where the parent stands among all candidates: behind those of the levels above its own.
        int first = c.level == 1 ? 0 : a.width + (c.level - 2) * a.beam_width * a.width;
        int above = first + (int)a.levels[c.level].chosen[(i64)b * a.beam_width + c.parent];
        LOOP for (int node = 1; node < i; node++)
            if (place_of(keys[node - 1]) == above)
                nodes.parent[i] = node;
    }
    __syncthreads();
    write_tree(a.out, nodes, a.size, b, length, a.capacity);
}
