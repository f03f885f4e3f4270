// From the target model's choices to the accepted path and the new tokens.
#include "common.cuh"

struct AcceptArguments
{
    const i64 *input_ids, *parents, *choices;    // [B, N]
    const float *node_log_probs;                 // [B, N], of the choices; may be null, as new_log_probs then is
    i64 *path, *new_counts, *new_tokens;         // [B, P], [B], [B, P]
    float *new_log_probs;                        // [B, P]
    int num_nodes, num_places;
};

// Grid: sequences.
KERNEL(accept, AcceptArguments)
{
    int b = blockIdx.x;
    const i64 *tokens = a.input_ids + (i64)b * a.num_nodes, *parents = a.parents + (i64)b * a.num_nodes;
    const i64 *choices = a.choices + (i64)b * a.num_nodes;
    int *accepted = (int *)shared_memory;
    EACH(place, a.num_places)
        accepted[place] = -1;
    __syncthreads();
    EACH(i, a.num_nodes) {
        // Up to the root, as long as the model chose each node after its parent.
        int node = i, depth = 0;
        while (node > 0 && parents[node] >= 0 && choices[parents[node]] == tokens[node]) {
            node = (int)parents[node];
            depth++;
        }
        // Siblings have different tokens, so of every depth one node at most is accepted.
        if (node == 0 && depth < a.num_places)
            accepted[depth] = i;
    }
    __syncthreads();
    EACH(place, a.num_places) {
        i64 at = (i64)b * a.num_places + place;
        int node = accepted[place];
        bool is_last = node >= 0 && (place + 1 == a.num_places || accepted[place + 1] < 0);
        a.path[at] = node >= 0 ? node : place;
        a.new_tokens[at] = node >= 0 ? choices[node] : 0;
        if (is_last)
            a.new_counts[b] = place + 1;
        if (a.new_log_probs)
            a.new_log_probs[at] = a.node_log_probs[(i64)b * a.num_nodes + least(node >= 0 ? node : place, a.num_nodes - 1)];
    }
}
