// The part of ONNX Runtime's C interface that its operators need, without its headers, which its packages lack.
//
// Functions are called by their places in the table OrtApi, which keep their meaning in later versions.

#pragma once

#include <cstddef>
#include <cstdint>

namespace {

struct OrtStatus;
struct OrtValue;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtTensorTypeAndShapeInfo;
using OrtApi = const void* const;

struct OrtApiBase {
  OrtApi* (*get_api)(uint32_t version);
  const char* (*get_version_string)();
};

struct OrtCustomOp {
  uint32_t version;
  void* (*create_kernel)(const OrtCustomOp*, OrtApi*, const OrtKernelInfo*);
  const char* (*get_name)(const OrtCustomOp*);
  const char* (*get_execution_provider)(const OrtCustomOp*);
  int (*get_input_type)(const OrtCustomOp*, size_t);
  size_t (*get_input_count)(const OrtCustomOp*);
  int (*get_output_type)(const OrtCustomOp*, size_t);
  size_t (*get_output_count)(const OrtCustomOp*);
  void (*compute)(void*, OrtKernelContext*);
  void (*destroy_kernel)(void*);
  int (*get_input_characteristic)(const OrtCustomOp*, size_t);
  int (*get_output_characteristic)(const OrtCustomOp*, size_t);
  int (*get_input_memory_type)(const OrtCustomOp*, size_t);
  int (*get_variadic_input_min_arity)(const OrtCustomOp*);
  int (*get_variadic_input_homogeneity)(const OrtCustomOp*);
  int (*get_variadic_output_min_arity)(const OrtCustomOp*);
  int (*get_variadic_output_homogeneity)(const OrtCustomOp*);
  OrtStatus* (*create_kernel_with_status)(const OrtCustomOp*, OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*compute_with_status)(void*, OrtKernelContext*);
  void* unused[7];
};

// The version whose table has everything below, and the least that knows the last fields of OrtCustomOp.
constexpr uint32_t API_VERSION = 17;
constexpr int FLOAT = 1, UINT8 = 2, INT64 = 7, BOOL = 9;
constexpr int INVALID_ARGUMENT = 2;

OrtApi* api;

#define ORT_FUNCTION(name, place, result, ...) \
  template <class... Arguments>                \
  result name(Arguments... arguments) {        \
    return reinterpret_cast<result (*)(__VA_ARGS__)>(const_cast<void*>(api[place]))(arguments...); \
  }

ORT_FUNCTION(create_status, 0, OrtStatus*, int, const char*)
ORT_FUNCTION(create_domain, 26, OrtStatus*, const char*, OrtCustomOpDomain**)
ORT_FUNCTION(add_operator, 27, OrtStatus*, OrtCustomOpDomain*, const OrtCustomOp*)
ORT_FUNCTION(add_domain, 28, OrtStatus*, OrtSessionOptions*, OrtCustomOpDomain*)
ORT_FUNCTION(tensor_data, 51, OrtStatus*, OrtValue*, void**)
ORT_FUNCTION(num_dimensions, 61, OrtStatus*, const OrtTensorTypeAndShapeInfo*, size_t*)
ORT_FUNCTION(dimensions, 62, OrtStatus*, const OrtTensorTypeAndShapeInfo*, int64_t*, size_t)
ORT_FUNCTION(type_and_shape, 65, OrtStatus*, const OrtValue*, OrtTensorTypeAndShapeInfo**)
ORT_FUNCTION(attribute_float, 85, OrtStatus*, const OrtKernelInfo*, const char*, float*)
ORT_FUNCTION(attribute_int, 86, OrtStatus*, const OrtKernelInfo*, const char*, int64_t*)
ORT_FUNCTION(input, 90, OrtStatus*, const OrtKernelContext*, size_t, const OrtValue**)
ORT_FUNCTION(output, 91, OrtStatus*, OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**)
ORT_FUNCTION(release_type_and_shape, 99, void, OrtTensorTypeAndShapeInfo*)
ORT_FUNCTION(constant_input, 249, OrtStatus*, const OrtKernelInfo*, size_t, int*, const OrtValue**)
ORT_FUNCTION(parallel_for, 274, OrtStatus*, const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*)

// Passes a failure of ONNX Runtime on.
#define TRY(call)                    \
  do {                               \
    if (OrtStatus* failed = (call)) return failed; \
  } while (0)

// ---- Tensors --------------------------------------------------------------------------------------------------

struct Tensor {
  void* data;
  int64_t shape[4];
  size_t rank;
};

OrtStatus* read_tensor(const OrtValue* value, Tensor& tensor) {
  OrtTensorTypeAndShapeInfo* info;
  TRY(type_and_shape(value, &info));
  OrtStatus* failed = num_dimensions(info, &tensor.rank);
  if (!failed && tensor.rank > 4) failed = create_status(INVALID_ARGUMENT, "a tensor has over 4 axes");
  if (!failed) failed = dimensions(info, tensor.shape, tensor.rank);
  release_type_and_shape(info);
  if (failed) return failed;
  return tensor_data(const_cast<OrtValue*>(value), &tensor.data);
}

OrtStatus* read_input(OrtKernelContext* context, size_t index, Tensor& tensor) {
  const OrtValue* value;
  TRY(input(context, index, &value));
  return read_tensor(value, tensor);
}

// The first COUNT inputs.
template <size_t COUNT>
OrtStatus* read_inputs(OrtKernelContext* context, Tensor (&tensors)[COUNT]) {
  for (size_t index = 0; index < COUNT; ++index) TRY(read_input(context, index, tensors[index]));
  return nullptr;
}

// Lets the threads of the session call a function with every number below ``count``.
template <class Work>
OrtStatus* share(OrtKernelContext* context, void (*function)(void*, size_t), int64_t count, Work& work) {
  return parallel_for(context, function, static_cast<size_t>(count), size_t{0}, static_cast<void*>(&work));
}

// An output in a shape, and its memory.
OrtStatus* make_output(OrtKernelContext* context, size_t index, const int64_t* shape, size_t rank, void** data) {
  OrtValue* value;
  TRY(output(context, index, shape, rank, &value));
  return tensor_data(value, data);
}

}  // namespace
