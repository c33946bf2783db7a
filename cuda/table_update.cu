// Puts changed columns of the page table from a staging slot into the table on the device: one block a change. A change names its
// row, its first column, how many columns, and where its page ids begin in the slot. Row, columns and ids are checked here
// although the host made them.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128) table_update(const __grid_constant__ specrs::TableUpdateParams p) {
    using namespace specrs;
    const int32_t change = blockIdx.x;
    const volatile int32_t *staged = reinterpret_cast<const volatile int32_t *>(p.staged);
    // The grid has as many blocks as there are changes, whose heads lie within the slot: the launcher saw to it.
    const int32_t row = staged[4 * change], first = staged[4 * change + 1];
    const int32_t count = staged[4 * change + 2], begin = staged[4 * change + 3];
    const bool reporter = threadIdx.x == 0;
    if (!in_bounds(row, p.table.rows)) {
        if (reporter) {
            record_fault(p.report, KERNEL_TABLE_UPDATE, BUFFER_TABLE_ROWS, row, change, row, p.table.rows);
        }
        return;
    }
    const int64_t column_end = static_cast<int64_t>(first) + count, staged_end = static_cast<int64_t>(begin) + count;
    if (first < 0 || count < 0 || column_end > p.table.columns) {
        if (reporter) {
            const int64_t index = first < 0 ? first : count < 0 ? count : column_end - 1;
            record_fault(p.report, KERNEL_TABLE_UPDATE, BUFFER_PAGE_TABLE, row, change, index, p.table.columns);
        }
        return;
    }
    if (begin < 0 || staged_end > p.staged_words) {
        if (reporter) {
            const int64_t index = begin < 0 ? begin : staged_end - 1;
            record_fault(p.report, KERNEL_TABLE_UPDATE, BUFFER_TABLE_STAGED, row, change, index, p.staged_words);
        }
        return;
    }
    int32_t *line = table_row(p.table, row) + first;
    for (int32_t i = threadIdx.x; i < count; i += blockDim.x) {
        const int32_t page = staged[begin + i];
        if (in_bounds(page, p.table.num_pages)) {
            line[i] = page;
        } else {
            record_fault(p.report, KERNEL_TABLE_UPDATE, BUFFER_PAGE, row, first + i, page, p.table.num_pages);
        }
    }
}
