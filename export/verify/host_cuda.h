// Runs CUDA kernels on the host, so that g++ compiles and tests their source where there is no GPU.
//
// Every thread of a block is a fiber. It runs until __syncthreads, then the next fiber does. When all of them
// are there, the next phase begins. The order of the fibers in a phase, and of the blocks, is the caller's: a
// result that depends on it is a race. Shared memory is filled with a pattern before each block, so that
// nothing can rely on what is there, and checked behind what a launch asked for.
#pragma once
#include <csetjmp>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <ucontext.h>
#include <vector>

struct Dim3 { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
static Dim3 threadIdx, blockIdx, blockDim, gridDim;

#define __device__
#define __forceinline__ inline
#define __shared__

static inline int atomicAdd(int *sum, int value) { int before = *sum; *sum += value; return before; }
static inline int __float_as_int(float value) { int bits; std::memcpy(&bits, &value, 4); return bits; }
static inline float __int_as_float(int bits) { float value; std::memcpy(&value, &bits, 4); return value; }

static const int MAX_SHARED = 256 * 1024, STACK = 64 * 1024;
alignas(16) unsigned long long shared_memory[MAX_SHARED / 8];

namespace host {

struct Fiber
{
    jmp_buf at;
    ucontext_t first;
    char *stack;
    bool is_done;
};

static std::vector<Fiber *> fibers;
static Fiber *running;
static jmp_buf scheduler;
static std::function<void()> kernel;

// A fiber lives for all launches, since making one takes longer than a phase.
static void live()
{
    for (;;) {
        kernel();
        running->is_done = true;
        if (!_setjmp(running->at))
            _longjmp(scheduler, 1);
    }
}

static Fiber *make_fiber()
{
    Fiber *fiber = new Fiber();
    fiber->stack = (char *)std::malloc(STACK);
    getcontext(&fiber->first);
    fiber->first.uc_stack.ss_sp = fiber->stack;
    fiber->first.uc_stack.ss_size = STACK;
    makecontext(&fiber->first, live, 0);
    return fiber;
}

struct Order
{
    unsigned long long state; // 0: ascending, 1: descending, others: random

    void permute(std::vector<int> &order)
    {
        std::iota(order.begin(), order.end(), 0);
        for (int i = (int)order.size() - 1; i > 0 && state; i--) {
            int other = state == 1 ? (int)order.size() - 1 - i : (int)(next() % (i + 1));
            if (state != 1 || other < i)
                std::swap(order[i], order[other]);
        }
    }

    unsigned long long next()
    {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return state >> 11;
    }
};

static void resume(int index, std::vector<bool> &is_started)
{
    running = fibers[index];
    threadIdx = {(unsigned)index, 0, 0};
    if (_setjmp(scheduler))
        return;
    if (is_started[index])
        _longjmp(running->at, 1);
    is_started[index] = true;
    setcontext(&running->first);
}

enum Fault { NONE, DIVERGED, OVERRUN };

static std::vector<bool> is_started;

static int run_block(int threads, int shared_bytes, Order &order)
{
    std::memset(shared_memory, 0xA5, MAX_SHARED);
    for (int i = 0; i < threads; i++)
        fibers[i]->is_done = false;
    std::vector<int> turns(threads);
    for (int done = 0; done == 0;) {
        order.permute(turns);
        for (int index : turns) {
            resume(index, is_started);
            done += fibers[index]->is_done;
        }
        // Some threads have ended while others wait for them.
        if (done != 0 && done != threads)
            return DIVERGED;
    }
    const unsigned char *bytes = (const unsigned char *)shared_memory;
    for (int i = shared_bytes; i < MAX_SHARED; i++)
        if (bytes[i] != 0xA5)
            return OVERRUN;
    return NONE;
}

// grid: blocks in x, y and z
static int run(std::function<void()> body, const int *grid, int threads, int shared_bytes, unsigned long long seed)
{
    while ((int)fibers.size() < threads) {
        fibers.push_back(make_fiber());
        is_started.push_back(false);
    }
    kernel = body;
    gridDim = {(unsigned)grid[0], (unsigned)grid[1], (unsigned)grid[2]};
    blockDim = {(unsigned)threads, 1, 1};
    Order order = {seed};
    std::vector<int> blocks(grid[0] * grid[1] * grid[2]);
    order.permute(blocks);
    for (int block : blocks) {
        blockIdx = {(unsigned)(block % grid[0]), (unsigned)(block / grid[0] % grid[1]), (unsigned)(block / grid[0] / grid[1])};
        int fault = run_block(threads, shared_bytes, order);
        if (fault)
            return fault;
    }
    return NONE;
}

} // namespace host

// A kernel ends here in every thread but the last of a phase, so nothing of it may be kept in registers.
static void __attribute__((noinline)) __syncthreads()
{
    if (!_setjmp(host::running->at))
        _longjmp(host::scheduler, 1);
}

// Returns a Fault.
#define KERNEL(name, Arguments)                                                                                  \
    static void name##_of_a_thread(const Arguments &a);                                                           \
    extern "C" int size_of_##name() { return (int)sizeof(Arguments); }                                            \
    extern "C" int name(const void *arguments, const int *grid, int threads, int bytes, unsigned long long seed)  \
    {                                                                                                             \
        auto body = [arguments] { name##_of_a_thread(*(const Arguments *)arguments); };                           \
        return host::run(body, grid, threads, bytes, seed);                                                       \
    }                                                                                                             \
    static void name##_of_a_thread(const Arguments &a)
