// From the nodes of a tree to the inputs of the target model's pass over it.
#pragma once
#include "common.cuh"

// Outputs of a search graph, as export/step/contracts.py has them.
struct TreeOutputs
{
    i64 *input_ids, *position_ids;
    bool *attn_mask;
    i64 *parents, *depths;
    bool *ancestors;
    float *node_log_probs;
};

// The nodes of a block's tree in shared memory; the root is node 0. A place without a node has no parent.
struct Nodes
{
    int *token, *parent, *depth;
    float *log_prob;
    u32 *reach; // [size, words]: bit j of row i is set if j is i or an ancestor of i
};

static __device__ __forceinline__ int words_of(int size) { return (size + 31) / 32; }

// Whether this block writes the mask of the text, [size, capacity] of sequence b, which all but the first block
// of a sequence do.
static __device__ bool writes_text_mask(bool *masks, int b, int size, int capacity, i64 length)
{
    if (blockIdx.x == 0)
        return false;
    fill_mask(masks + (i64)b * size * capacity, size, capacity, length, 0, 0, size);
    return true;
}

static __device__ Nodes cut_nodes(Cutter &cutter, int size)
{
    Nodes nodes;
    nodes.token = cutter.cut<int>(size);
    nodes.parent = cutter.cut<int>(size);
    nodes.depth = cutter.cut<int>(size);
    nodes.log_prob = cutter.cut<float>(size);
    nodes.reach = cutter.cut<u32>(size * words_of(size));
    return nodes;
}

// Writes the tree of sequence b. All threads of the block call it, after a barrier behind what made the nodes.
static __device__ void write_tree(const TreeOutputs &out, const Nodes &nodes, int size, int b, i64 length, int capacity)
{
    int words = words_of(size);
    EACH(i, size) {
        u32 *row = nodes.reach + i * words;
        for (int word = 0; word < words; word++)
            row[word] = 0;
        for (int node = i; node >= 0; node = nodes.parent[node])
            row[node / 32] |= 1u << node % 32;
        i64 at = (i64)b * size + i;
        out.input_ids[at] = nodes.token[i];
        out.position_ids[at] = length + nodes.depth[i];
        out.parents[at] = nodes.parent[i];
        out.depths[at] = nodes.depth[i];
        out.node_log_probs[at] = nodes.log_prob[i];
    }
    __syncthreads();
    i64 first = (i64)b * size * size;
    bool *mask = out.attn_mask + (i64)b * size * capacity;
    EACH(i, size * size) {
        int row = i / size, column = i % size;
        bool reaches = nodes.reach[row * words + column / 32] >> column % 32 & 1;
        out.ancestors[first + i] = reaches;
        if (length + column < capacity)
            mask[(i64)row * capacity + length + column] = reaches;
    }
}
