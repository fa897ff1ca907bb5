// Few rows (decoding) are bound by reading the weight, many (prompts) by arithmetic: two kernels.
#include "linear.h"

namespace fg {
namespace {

// Where the second kernel becomes the faster one, measured. Of bfloat16 the first reads half as much.
constexpr int64_t kManyRows = 6, kManyRowsOfHalf = 11;

}  // namespace
}  // namespace fg

extern "C" void fg_linear(const fg::LinearArgs* args) {
  if (args->rows < (args->dtype == fg::kBFloat16 ? fg::kManyRowsOfHalf : fg::kManyRows)) fg::linear_few_rows(*args);
  else fg::linear_many_rows(*args);
}
