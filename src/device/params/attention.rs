//! `attention`: the constants that its bits follow from, and its parameters.

use super::faults::Report;

declare! {
    constants {
        /// Names the rule that attention's bits follow, these constants included: a change of any of them, or of a
        /// formula in `cuda/attention.cu` or its headers, takes another number.
        ATTENTION_NUMERICS_ID = 1,
        /// Keys of a block, which share one maximum; a block begins at a multiple of it.
        ATTENTION_BLOCK = 128,
        /// Keys of a split, whose sums start fresh; a split begins at a multiple of it.
        ATTENTION_SPLIT = 1024,
        /// A row's last keys, itself included, which are taken one by one: a node of a tree may have as many ancestors,
        /// itself included, that are not stored at their logical positions.
        ATTENTION_TAIL = 8,
    }
    ids {
        Kernel {
            KERNEL_ATTENTION = 10: "attention",
        }
        Buffer {
            BUFFER_ATTENTION_QUERIES = 100: "queries",
            BUFFER_ATTENTION_QUERIES_ORDER = 101: "queries (starts decrease)",
            BUFFER_ATTENTION_REQUEST_QUERIES = 102: "queries of one request",
            BUFFER_ATTENTION_TABLE_TOKENS = 103: "page table row (tokens)",
            BUFFER_ATTENTION_TABLE_ROWS = 104: "page table rows",
            BUFFER_ATTENTION_CACHE_PAGE = 105: "cache (page)",
            BUFFER_ATTENTION_MASK_BITS = 106: "mask (bit of no key)",
            BUFFER_ATTENTION_MASK_BRANCH = 107: "mask (nodes off the spine)",
            BUFFER_ATTENTION_FIRST_PAGES = 108: "page table row (first page)",
        }
    }
    structs {
        /// Parameters of `cuda/attention.cu`, passed by value.
        AttentionParams {
            /// `[queries, kv_heads * group, head_dim]`.
            q: u64,
            /// `[num_slots, kv_heads, head_dim]`: keys of one layer.
            k: u64,
            /// Values, in the form of `k`.
            v: u64,
            /// Output in the form of `q`; of `f32` where `out_f32` is 1.
            out: u64,
            /// `int32[table_rows, table_width]`: page ids.
            table: u64,
            /// `int32[requests]`: row of the table of each request; 0: request i has row i.
            rows: u64,
            /// `int32[requests]`: L, keys before a request's own queries.
            lens: u64,
            /// `int32[requests + 1]`: first query of each request, and the end.
            starts: u64,
            /// `uint64[queries]`: keys at L + bit; 0: causal.
            mask: u64,
            /// `int32[requests]`: column of the table at which each request's keys begin, at most that of position L; 0: all
            /// begin at column 0.
            first_pages: u64,
            /// `int32[2 + 2 * requests]`: which items there are, from `attend` to `merge`.
            schedule: u64,
            /// `f32[slots, slot_rows, head_dim]`: sums of a split.
            partials: u64,
            /// `f32[slots, slot_rows, 2]`: maximum and row sum of a split.
            states: u64,
            /// Destination of faults.
            report: Report,
            /// Requests, at most `MAX_ATTENTION_REQUESTS`.
            requests: i32,
            /// Capacity of `q` and `out`, in queries.
            queries: i32,
            /// Largest number of queries of one request.
            max_queries: i32,
            /// Key and value heads.
            kv_heads: i32,
            /// Query heads of a key and value head.
            group: i32,
            /// Rows of the table.
            table_rows: i32,
            /// Pages of a row of the table.
            table_width: i32,
            /// Tokens that a row of the table can place; at most `i32::MAX`.
            capacity: i32,
            /// log2 of the tokens of a page.
            page_shift: i32,
            /// Pages of a plane.
            pages: i32,
            /// Bits of a draft step's mask, by branch and step; 0 for a tree or causal rows.
            draft_slots: i32,
            /// Steps of a branch in `draft_slots`; 0 where that is 0.
            draft_steps: i32,
            /// 1 for `f32` output.
            out_f32: i32,
            /// Slots of the workspace; at least the CTAs of the grid.
            slots: i32,
            /// Rows of a slot.
            slot_rows: i32,
            /// Rows of a tile.
            tile_rows: i32,
            /// Clusters of the grid, which has a block for each item; 0 for a grid without.
            clusters: i32,
            /// Entries of the ring of K and V tiles.
            stages: i32,
            /// Bits of the `f32` factor from a score to an exponent of 2.
            scale_bits: u32,
            /// Pieces of 16 bytes of a slot of one plane; a plane's all are fewer than `u32::MAX`.
            slot_pieces: u32,
            /// Bits of the `f32` factor from a score to the exponent of e^2x in its tanh; 0 where scores have no cap.
            cap_bits: u32,
            /// Zero; keeps the size a multiple of 8.
            reserved: u32,
        }
    }
}
