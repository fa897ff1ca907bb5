// Rows of a table by their numbers.
#include <cstring>

#include "rows.h"

namespace fg {

// table [table_rows, row_bytes] and ids [rows] -> out [rows, row_bytes]. Where an id is no row of
// the table, out gets zeros, and *wrong the place among the ids.
struct EmbeddingArgs {
  const int64_t* ids;
  const char* table;
  char* out;
  int64_t* wrong;
  int64_t rows, table_rows, row_bytes;
};

}  // namespace fg

extern "C" void fg_embedding(const fg::EmbeddingArgs* args) {
  int64_t bytes = args->row_bytes;
  fg::each_row(args->rows, bytes / 4, [&](int64_t row) {
    int64_t id = args->ids[row];
    char* out = args->out + row * bytes;
    if (id >= 0 && id < args->table_rows) {
      std::memcpy(out, args->table + id * bytes, bytes);
    } else {
      std::memset(out, 0, bytes);
      __atomic_store_n(args->wrong, row, __ATOMIC_RELAXED);
    }
  });
}
