// The operators of this project for ONNX Runtime on a CPU (runtime/engines/operators.py compiles this file).

#include "attention.h"
#include "products.h"

namespace {

// The types of the tensors of an operator, with a letter for each: f(loat), u(int8), i(nt64), b(ool); those from
// ``num_required`` on may be missing.
int type_of(const char* letters, size_t index) {
  const char letter = letters[index];
  return letter == 'f' ? FLOAT : letter == 'u' ? UINT8 : letter == 'i' ? INT64 : BOOL;
}

struct Attention {
  static constexpr size_t num_required = 7;
  static constexpr char inputs[] = "fffbiff", outputs[] = "fff";
  static constexpr auto create = create_attention;
  static void destroy(void* kernel) { free(kernel); }
};

struct TreeAttention : Attention {
  static const char* name(const OrtCustomOp*) { return "TreeAttention"; }
  static constexpr auto compute = compute_tree_attention;
};

struct RotaryTreeAttention : Attention {
  static const char* name(const OrtCustomOp*) { return "RotaryTreeAttention"; }
  static constexpr auto compute = compute_rotary_tree_attention;
};

struct TreeProduct {
  static constexpr size_t num_required = 2;
  static constexpr char inputs[] = "fufff", outputs[] = "f";
  static const char* name(const OrtCustomOp*) { return "TreeProduct"; }
  static constexpr auto create = create_product;
  static constexpr auto destroy = destroy_product;
  static constexpr auto compute = compute_product;
};

template <class Operator>
OrtCustomOp declare() {
  OrtCustomOp declared = {};
  declared.version = API_VERSION;
  declared.get_name = Operator::name;
  declared.get_execution_provider = [](const OrtCustomOp*) -> const char* { return "CPUExecutionProvider"; };
  declared.get_input_type = [](const OrtCustomOp*, size_t index) { return type_of(Operator::inputs, index); };
  declared.get_input_count = [](const OrtCustomOp*) { return sizeof(Operator::inputs) - 1; };
  declared.get_output_type = [](const OrtCustomOp*, size_t index) { return type_of(Operator::outputs, index); };
  declared.get_output_count = [](const OrtCustomOp*) { return sizeof(Operator::outputs) - 1; };
  declared.destroy_kernel = Operator::destroy;
  declared.get_input_characteristic = [](const OrtCustomOp*, size_t index) {
    return index < Operator::num_required ? 0 : 1;
  };
  const auto always_0 = [](const OrtCustomOp*, size_t) { return 0; };  // required; in the provider's memory
  declared.get_output_characteristic = always_0;
  declared.get_input_memory_type = always_0;
  declared.create_kernel_with_status = Operator::create;
  declared.compute_with_status = Operator::compute;
  return declared;
}

const OrtCustomOp OPERATORS[] = {
    declare<TreeAttention>(), declare<RotaryTreeAttention>(), declare<TreeProduct>()};

OrtStatus* make_domain(OrtCustomOpDomain** domain) {
  TRY(create_domain("ctc_speculator", domain));
  for (const OrtCustomOp& each : OPERATORS) TRY(add_operator(*domain, &each));
  return nullptr;
}

}  // namespace

// Called by ONNX Runtime for the options of every session. The domain lives as long as the process.
extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  static OrtCustomOpDomain* domain = nullptr;
  api = base->get_api(API_VERSION);
  if (!domain) TRY(make_domain(&domain));
  return add_domain(options, domain);
}
