// Few rows (decoding) are bound by reading the weight, many (prompts) by arithmetic: two kernels.
#include "linear.h"

namespace fg {

// Where packing the weight for the second kernel begins to pay, measured.
constexpr int64_t kManyRows = 12;

}  // namespace fg

extern "C" void fg_linear(const fg::LinearArgs* args) {
  if (args->rows < fg::kManyRows) fg::linear_few_rows(*args);
  else fg::linear_many_rows(*args);
}
