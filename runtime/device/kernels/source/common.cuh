// What all kernels of a step share: the form of a kernel, masks, and sums over a block.
//
// The same source is compiled by NVRTC for GPUs, and by g++ for tests, where export/verify/host_cuda.h stands
// in for CUDA. So nothing here uses warps, and threads meet only at __syncthreads. Sums of floats never depend on
// the order of the threads.
#pragma once

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;

// Threads of a block at most, so that the compiler gives each of them few enough registers.
#define MAX_THREADS 512

#ifdef __CUDACC__
// A kernel that takes one structure, the launch's arguments. runtime/device/kernels/arguments.py mirrors them.
#define KERNEL(name, Arguments)                                                                                  \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS) name(const __grid_constant__ Arguments a)
#endif

// The numbers below `count`, dealt out to the threads of a block. Unrolled loops would make modules three times as
// large, and no stage waits for them.
#define EACH(i, count) _Pragma("unroll 1") for (int i = threadIdx.x; i < (count); i += blockDim.x)
#define LOOP _Pragma("unroll 1")

// As much as a launch asks for; the arrays of a block are cut from it.
extern __shared__ u64 shared_memory[];

// The largest negative float is about -3.4e38; this is the export's MISSING, for a node that there is not.
#define MISSING -1e30f
// What every level takes off its score, as drafters/tree_search.py explains.
#define LEVEL_DISCOUNT 1e-5f
#define NO_PARENT -1

static __device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }
static __device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }
static __device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Numbers that ascend as floats do; 0 and -0 have the same. Not for NaN.
static __device__ __forceinline__ u32 ascending(float value)
{
    u32 bits = (u32)__float_as_int(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Cuts arrays from the block's shared memory, one after another.
struct Cutter
{
    char *next;

    template <typename T> __device__ T *cut(int count)
    {
        T *found = (T *)next;
        next += (count * (int)sizeof(T) + 7) / 8 * 8;
        return found;
    }
};

// Marks positions of every row of a mask [rows, capacity], except those of a window that another block writes:
// those before `length`, and `frames` of them from `first_frame` on. Blocks 1, 2, ... of a sequence share this.
static __device__ void fill_mask(bool *mask, int rows, int capacity, i64 length, i64 first_frame, int frames, int window)
{
    u32 total = (u32)rows * capacity, step = (gridDim.x - 1) * blockDim.x;
    LOOP for (u32 i = (blockIdx.x - 1) * blockDim.x + threadIdx.x; i < total; i += step) {
        i64 position = i % (u32)capacity;
        if (position >= length && position < length + window)
            continue;
        mask[i] = position < length || (position >= first_frame && position < first_frame + frames);
    }
}

// Sorts keys, the largest first. `count` is a power of two. Bitonic sort (Batcher, 1968).
static __device__ void sort_descending(u64 *keys, int count)
{
    LOOP for (int size = 2; size <= count; size *= 2)
        LOOP for (int distance = size / 2; distance > 0; distance /= 2) {
            EACH(i, count / 2) {
                int low = 2 * i - (i & (distance - 1));
                int high = low + distance;
                u64 first = keys[low], second = keys[high];
                // In every other run of `size` keys the smallest comes first.
                if ((first < second) == ((low & size) == 0)) {
                    keys[low] = second;
                    keys[high] = first;
                }
            }
            __syncthreads();
        }
}

// A key that orders by score, and equal scores by their place: the first place is the best, as in ONNX's TopK.
static __device__ __forceinline__ u64 key_of(u32 score, int place) { return (u64)score << 32 | (0xffffffffu - (u32)place); }
static __device__ __forceinline__ int place_of(u64 key) { return (int)(0xffffffffu - (u32)key); }
