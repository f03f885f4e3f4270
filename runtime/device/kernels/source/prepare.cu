// The positions, mask and write index that a head's pass reads.
#include "common.cuh"

// Outputs that the head does not read are null.
struct PrepareArguments
{
    const i64 *lengths, *counts;                       // [B]; lengths may be null
    i64 *query_indices;                                // [B, 1]
    i64 *context_position_ids, *frame_position_ids;    // [B, P], [B, T]
    bool *attn_mask;                                   // [B, 1, rows, S]
    i64 *write_index;                                  // [B]
    int num_places, num_frames, num_rows, capacity;
};

// Grid: the first block of a sequence writes numbers, the others the mask; sequences.
KERNEL(prepare, PrepareArguments)
{
    int b = blockIdx.y;
    i64 length = a.lengths ? a.lengths[b] : 0, start = length - a.counts[b];
    if (blockIdx.x > 0) {
        bool *mask = a.attn_mask + (i64)b * a.num_rows * a.capacity;
        fill_mask(mask, a.num_rows, a.capacity, length, start + a.num_places, a.num_frames, 0);
        return;
    }
    if (a.context_position_ids)
        EACH(i, a.num_places)
            a.context_position_ids[(i64)b * a.num_places + i] = start + i;
    if (a.frame_position_ids)
        EACH(i, a.num_frames)
            a.frame_position_ids[(i64)b * a.num_frames + i] = length + i;
    if (threadIdx.x == 0) {
        if (a.query_indices)
            a.query_indices[b] = a.counts[b] - 1;
        if (a.write_index)
            a.write_index[b] = start;
    }
}
