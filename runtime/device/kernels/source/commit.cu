// Packs the accepted path's keys and values behind the text, and picks its features for the head.
#include "common.cuh"

#define MAX_CACHES 256

struct CommitArguments
{
    const i64 *path, *lengths;           // [B, P], [B]
    const char *features;                // [B, N, row of features]
    char *path_features;                 // [B, P, row of features]
    int num_places, num_nodes, num_heads, capacity;
    int row_bytes, feature_bytes;        // of a position of one head, and of a node's features
    int num_caches, reserved;
    char *caches[MAX_CACHES];            // [B, KH, S, row] each
};

// Moves rows of one head: from length + path[i] to length + i. Rows that stay where they are are not touched.
template <typename Word> static __device__ void pack_rows(char *head, const i64 *path, i64 length, const CommitArguments &a)
{
    int words = a.row_bytes / (int)sizeof(Word);
    Word *rows = (Word *)(head + length * a.row_bytes), *kept = (Word *)shared_memory;
    EACH(i, a.num_places * words) {
        int from = (int)path[i / words];
        if (from != i / words)
            kept[i] = rows[from * words + i % words];
    }
    // A row may be written where another one was read.
    __syncthreads();
    EACH(i, a.num_places * words)
        if (path[i / words] != i / words)
            rows[i] = kept[i];
}

template <typename Word> static __device__ void pick_features(int b, const i64 *path, const CommitArguments &a)
{
    int words = a.feature_bytes / (int)sizeof(Word);
    const Word *nodes = (const Word *)a.features + (i64)b * a.num_nodes * words;
    Word *picked = (Word *)a.path_features + (i64)b * a.num_places * words;
    int total = a.num_places * words, step = gridDim.x * blockDim.x;
    LOOP for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step)
        // Behind the path there may be more places than nodes.
        picked[i] = nodes[least((int)path[i / words], a.num_nodes - 1) * words + i % words];
}

// Grid: heads, caches and behind them the features, sequences.
KERNEL(commit, CommitArguments)
{
    int b = blockIdx.z, cache = blockIdx.y;
    const i64 *path = a.path + (i64)b * a.num_places;
    if (cache == a.num_caches) {
        if (a.feature_bytes % 16 == 0)
            pick_features<uint4>(b, path, a);
        else
            pick_features<unsigned short>(b, path, a);
        return;
    }
    char *head = a.caches[cache] + ((i64)b * a.num_heads + blockIdx.x) * a.capacity * a.row_bytes;
    if (a.row_bytes % 16 == 0)
        pack_rows<uint4>(head, path, a.lengths[b], a);
    else
        pack_rows<unsigned short>(head, path, a.lengths[b], a);
}
