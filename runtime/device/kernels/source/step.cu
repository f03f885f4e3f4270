// All kernels of a step's stages without weights, as one module.
#include "prepare.cu"
#include "search.cu"
#include "levels.cu"
#include "accept.cu"
#include "draw.cu"
#include "commit.cu"
