// table: the instruction sets that there are kernels for, the linear kernels that each selects, and which this CPU has.
#include <string>
#include <tuple>
#include <vector>

#include "linear.h"
#include "op_checks.h"

namespace omniserve {
namespace {

std::tuple<std::vector<std::string>, std::vector<std::string>, std::vector<int64_t>> table() {
  std::tuple<std::vector<std::string>, std::vector<std::string>, std::vector<int64_t>> columns;
  for (const InstructionSet& set : instruction_sets()) {
    std::get<0>(columns).push_back(set.name);
    std::get<1>(columns).push_back(linear_kernels_name(set.name));
    std::get<2>(columns).push_back(set.supported);
  }
  return columns;
}

}  // namespace
}  // namespace omniserve

STABLE_TORCH_LIBRARY(omniserve_isa, m) { m.def("table() -> (str[], str[], int[])"); }

STABLE_TORCH_LIBRARY_IMPL(omniserve_isa, CompositeExplicitAutograd, m) {
  m.impl("table", TORCH_BOX(&omniserve::table));
}
