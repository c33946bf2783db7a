//! The page table of a pool, and `table_update`, which changes columns of it.

use super::faults::Report;

declare! {
    ids {
        Kernel {
            KERNEL_TABLE_UPDATE = 2: "table_update",
        }
        Buffer {
            BUFFER_TABLE_STAGED = 5: "staged page ids",
            BUFFER_TABLE_ROWS = 42: "rows of the page table",
            BUFFER_PAGE_TABLE = 43: "row of the page table",
            BUFFER_PAGE = 44: "pages",
        }
    }
    structs {
        /// The page table of a pool.
        PageTable {
            /// `int32[rows * columns]`: page ids.
            pages: u64,
            /// Rows.
            rows: i32,
            /// Columns.
            columns: i32,
            /// Pages of the pool, the sink included: one past the largest id.
            num_pages: i32,
            /// Zero; keeps the size a multiple of 8.
            reserved: i32,
        }

        /// Parameters of `cuda/table_update.cu`, passed by value; a block a change.
        TableUpdateParams {
            /// Written.
            table: PageTable,
            /// `int32[staged_words]`: heads of four words, then page ids.
            staged: u64,
            /// Destination of faults.
            report: Report,
            /// Words of the staging slot.
            staged_words: i32,
            /// Zero; keeps the size a multiple of 8.
            reserved: i32,
        }
    }
}
