//! `kv_move` and `kv_commit`: rows of keys and values from slot to slot, and which rows an accepted path moves.

use super::faults::Report;
use super::table::PageTable;

declare! {
    ids {
        Kernel {
            KERNEL_KV_MOVE = 1: "kv_move",
            KERNEL_KV_COMMIT = 22: "kv_commit",
        }
        Buffer {
            BUFFER_CACHE_SRC = 1: "cache (source slot)",
            BUFFER_CACHE_DST = 2: "cache (destination slot)",
            BUFFER_MOVES = 3: "src and dst",
            BUFFER_OFFSETS_ORDER = 4: "src and dst (offsets decrease)",
            BUFFER_PATH_ORDER = 41: "accepted path (from the root, increasing)",
        }
    }
    structs {
        /// Parameters of `cuda/kv_move.cu`, passed by value.
        KvMoveParams {
            /// Bytes of `[planes][num_slots][row]`; a plane is K or V of one layer.
            cache: u64,
            /// `int32[moves]`.
            src: u64,
            /// `int32[moves]`.
            dst: u64,
            /// `int32[requests + 1]`.
            offsets: u64,
            /// Destination of faults.
            report: Report,
            /// Bytes of a plane: `num_slots` rows.
            plane_bytes: u64,
            /// Slots of a plane; slot 0 is the sink.
            num_slots: i32,
            /// Capacity of `src` and of `dst`.
            moves: i32,
            /// Rows of the batch; `offsets` holds one more.
            requests: i32,
            /// 2 * layers.
            planes: u32,
            /// Vectors of the kernel's width in a row; `planes * columns` always fits `i32`.
            columns: u32,
            /// Zero; keeps the size a multiple of 8.
            reserved: u32,
        }

        /// Parameters of `cuda/kv_commit.cu`, passed by value.
        KvCommitParams {
            /// `int32[requests + 1]`: first entry of each request in `paths`.
            offsets: u64,
            /// `int32[entries]`: accepted nodes.
            paths: u64,
            /// `int32[requests]`: lengths with the accepted nodes.
            new_lens: u64,
            /// Page table of the pool; written by a remap.
            table: PageTable,
            /// `int32[requests]`: the row of each request.
            rows: u64,
            /// `int32`: requests that are live; 0 where all are.
            live: u64,
            /// `int32[moves]`; 0 for a remap.
            src: u64,
            /// `int32[moves]`; 0 for a remap.
            dst: u64,
            /// `int32[requests + 1]`; 0 for a remap.
            move_offsets: u64,
            /// Destination of faults.
            report: Report,
            /// Requests.
            requests: i32,
            /// Capacity of `paths`.
            entries: i32,
            /// log2 of the tokens of a page.
            shift: i32,
            /// Most nodes of a tree; at most 1024.
            max_nodes: i32,
            /// Capacity of `src` and of `dst`.
            moves: i32,
            /// Zero; keeps the size a multiple of 8.
            reserved: i32,
        }
    }
}
