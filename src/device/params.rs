//! The parameter structs and the fault record of the kernels, each declared once, here.
//!
//! A declaration makes a `#[repr(C)]` struct of this module and its text in `HEADER`. `build.rs` includes this file and
//! writes that text as `params.cuh` beside the PTX. Both compilers assert that a struct has no padding: fields of the
//! same types in the same order then lie at the same offsets. A new kernel adds its struct and its ids below.
//!
//! Device addresses are `u64`, which has one layout for every compiler. The launchers fill them from typed views, and
//! nothing else builds these structs.

use std::mem::{offset_of, size_of};

/// The C++ name of a type that a field may have.
macro_rules! cpp {
    (u64) => {
        "uint64_t"
    };
    (i64) => {
        "int64_t"
    };
    (u32) => {
        "uint32_t"
    };
    (i32) => {
        "int32_t"
    };
}

/// Rust items and C++ text of constants, of tables of ids and of structs.
macro_rules! declare {
    (
        constants {$(
            $(#[doc = $constant_doc:literal])+
            $constant:ident = $constant_value:literal,
        )+}
        ids {$(
            $(#[doc = $table_doc:literal])+
            $table:ident as $enum:ident { $($id:ident = $value:literal: $text:literal,)+ }
        )+}
        structs {$(
            $(#[doc = $doc:literal])+
            $name:ident { $($(#[doc = $field_doc:literal])+ $field:ident: $ty:ident,)+ }
        )+}
    ) => {
        $(
            $(#[doc = $constant_doc])+
            pub const $constant: i32 = $constant_value;
        )+
        $(
            $(#[doc = $table_doc])+
            pub const $table: &[(i32, &str)] = &[$(($value, $text)),+];
        )+
        $(
            $(#[doc = $doc])+
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
            #[repr(C)]
            pub struct $name {
                $($(#[doc = $field_doc])+ pub $field: $ty,)+
            }

            const _: () = {
                let mut end = 0;
                $(
                    assert!(offset_of!($name, $field) == end, "padding before a field: add a reserved one");
                    end += size_of::<$ty>();
                )+
                assert!(size_of::<$name>() == end, "padding at the end: add a reserved field");
            };
        )+

        /// The declarations in C++: `params.cuh`.
        #[doc(hidden)]
        pub const HEADER: &str = concat!(
            "// Written by build.rs from src/device/params.rs.\n#pragma once\n\n#include <cstdint>\n\n",
            "namespace specrs {\n",
            $(
                $("\n//", $constant_doc,)+
                "\nconstexpr int32_t ", stringify!($constant), " = ", stringify!($constant_value), ";\n",
            )+
            $(
                $("\n//", $table_doc,)+
                "\nenum ", stringify!($enum), " : int32_t {\n",
                $("    ", stringify!($id), " = ", $value, ",  // ", $text, "\n",)+
                "};\n",
            )+
            $(
                $("\n//", $doc,)+
                "\nstruct ", stringify!($name), " {\n",
                $($("    //", $field_doc, "\n",)+ "    ", cpp!($ty), " ", stringify!($field), ";\n",)+
                "};\nstatic_assert(sizeof(", stringify!($name), ") == 0", $(" + sizeof(", cpp!($ty), ")",)+
                ", \"padding: the mirror in src/device/params.rs has none\");\n",
            )+
            "\n}  // namespace specrs\n"
        );
    };
}

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
        /// Words of a slot of a ring before its lanes; the constants of a round are those of `round::round_end`.
        ROUND_HEADER = 16,
        /// Word of a slot: r while round r writes it, r + 1 once all of it is there.
        ROUND_SEQUENCE_AT = 0,
        /// Word of a slot: the round's number.
        ROUND_NUMBER_AT = 1,
        /// Word of a slot: live lanes.
        ROUND_LIVE_AT = 2,
        /// Word of a slot: why no further round should follow.
        ROUND_EXIT_AT = 3,
        /// Word of a slot: 1 where another round follows in the same launch.
        ROUND_CONTINUES_AT = 4,
        /// First of two words of a slot: nanoseconds of the device's clock.
        ROUND_TIME_AT = 6,
        /// Exit bit: a live lane is done.
        EXIT_DONE = 1,
        /// Exit bit: a lane's target scores were no numbers.
        EXIT_NAN = 2,
        /// Exit bit: a root's draft scores give no distribution.
        EXIT_UNSOUND = 4,
        /// Exit bit: an access was recorded that the host has not read.
        EXIT_FAULT = 8,
        /// Exit bit: the host asked.
        EXIT_ASKED = 16,
        /// Exit bit: the rounds of the launch are used up.
        EXIT_BUDGET = 32,
        /// Word of the control block: rounds that have ended, the number of the next.
        CONTROL_ROUNDS = 0,
        /// Word of the control block: rounds of the launch that are left.
        CONTROL_LEFT = 1,
        /// Word of the control block: exit bits of the last round.
        CONTROL_EXIT = 2,
        /// Word of the control block: blocks of the launch that are through; 0 between launches.
        CONTROL_TICKET = 3,
        /// Words of the control block.
        CONTROL_WORDS = 4,
    }
    ids {
        /// Values of [`FaultRecord::kernel`], and the names that errors carry.
        KERNELS as Kernel {
            KERNEL_KV_MOVE = 1: "kv_move",
            KERNEL_TABLE_UPDATE = 2: "table_update",
            KERNEL_ATTENTION = 10: "attention",
            KERNEL_EMBED = 16: "embed",
            KERNEL_GATHER_ROWS = 17: "gather_rows",
            KERNEL_RMS_NORM = 18: "add_rms_norm",
            KERNEL_GATED_UP = 19: "gated_up",
            KERNEL_ROPE_KV = 20: "rope_kv",
            KERNEL_VERIFY_GREEDY = 21: "verify_greedy",
            KERNEL_KV_COMMIT = 22: "kv_commit",
            KERNEL_DRAFT_SELECT = 23: "draft_select",
            KERNEL_TREE_BUILD = 24: "tree_build",
            KERNEL_TREE_UNITE = 25: "tree_unite",
            KERNEL_SAMPLE_VERIFY = 30: "sample_verify",
            KERNEL_PLAN = 31: "plan",
            KERNEL_PLAN_LISTS = 32: "plan_lists",
            KERNEL_PLAN_TABLES = 33: "plan_tables",
            KERNEL_TAIL_COPIES = 34: "tail_copies",
            KERNEL_ROUND_END = 40: "round_end",
            KERNEL_COPY_ROWS = 41: "copy_rows",
        }

        /// Values of [`FaultRecord::buffer`], and the names that errors carry.
        BUFFERS as Buffer {
            BUFFER_CACHE_SRC = 1: "cache (source slot)",
            BUFFER_CACHE_DST = 2: "cache (destination slot)",
            BUFFER_MOVES = 3: "src and dst",
            BUFFER_OFFSETS_ORDER = 4: "src and dst (offsets decrease)",
            BUFFER_TABLE_STAGED = 5: "staged page ids",
            BUFFER_ATTENTION_QUERIES = 100: "queries",
            BUFFER_ATTENTION_QUERIES_ORDER = 101: "queries (starts decrease)",
            BUFFER_ATTENTION_REQUEST_QUERIES = 102: "queries of one request",
            BUFFER_ATTENTION_TABLE_TOKENS = 103: "page table row (tokens)",
            BUFFER_ATTENTION_TABLE_ROWS = 104: "page table rows",
            BUFFER_ATTENTION_CACHE_PAGE = 105: "cache (page)",
            BUFFER_ATTENTION_MASK_BITS = 106: "mask (bit of no key)",
            BUFFER_ATTENTION_MASK_BRANCH = 107: "mask (nodes off the spine)",
            BUFFER_LIVE = 32: "live",
            BUFFER_EMBEDDING = 33: "embedding table",
            BUFFER_ROWS = 34: "rows",
            BUFFER_ROPE_TABLE = 35: "rope table",
            BUFFER_CACHE_SLOT = 36: "cache (slot)",
            BUFFER_TREES = 37: "nodes of all trees",
            BUFFER_OFFSETS_DECREASE = 38: "offsets (decreasing)",
            BUFFER_TREE = 39: "nodes of a tree",
            BUFFER_PATH = 40: "accepted path",
            BUFFER_PATH_ORDER = 41: "accepted path (from the root, increasing)",
            BUFFER_TABLE_ROWS = 42: "rows of the page table",
            BUFFER_PAGE_TABLE = 43: "row of the page table",
            BUFFER_PAGE = 44: "pages",
            BUFFER_BEAMS = 45: "candidates (beam)",
            BUFFER_TARGET_IDS = 46: "vocabulary (d2t target id)",
            BUFFER_CANDIDATE_PARENTS = 47: "candidates (parent)",
            BUFFER_SOUND = 48: "sound steps",
            BUFFER_MAX_NODES = 49: "max_nodes",
            BUFFER_TARGET_LOGITS = 50: "target logits",
            BUFFER_DRAFT_LOGITS = 51: "draft logits",
            BUFFER_EDITED_LOGITS = 60: "target logits after logit_bias and penalties",
            BUFFER_EDITS = 61: "edits",
            BUFFER_EDIT_TOKENS = 62: "edits (tokens)",
            BUFFER_LENGTHS = 64: "committed lengths",
            BUFFER_COUNTS = 65: "tokens of a request",
            BUFFER_CONTEXT = 67: "context",
            BUFFER_QUERIES = 68: "queries",
            BUFFER_TREE_PARENTS = 69: "tree parents",
            BUFFER_ANCESTORS = 70: "ancestor bits",
            BUFFER_ALLOCATED = 71: "allocated positions",
            BUFFER_POOL_PAGES = 72: "pool pages",
            BUFFER_COPIES = 73: "src and dst (tail copies)",
            BUFFER_KV_INDICES = 74: "kv_indices",
            BUFFER_CUSTOM_MASK = 75: "custom_mask",
            BUFFER_PACKED_MASK = 76: "packed_custom_mask",
            BUFFER_PREFIX_TABLE = 77: "page_table",
            BUFFER_EXPAND_TABLE = 78: "expand_page_table",
            BUFFER_NEW_LENGTHS = 80: "new lengths (length plus accepted nodes)",
            BUFFER_STOPS = 81: "stop tokens",
            BUFFER_ROWS_OUT = 82: "rows (destination)",
        }

        /// Values of [`FaultRecord::probe`], and the values that errors name.
        PROBES as Probe {
            PROBE_NONE = 0: "none",
            PROBE_NAN = 1: "NaN",
            PROBE_POSITIVE_INFINITY = 2: "+inf",
            PROBE_ALL_NEGATIVE_INFINITY = 3: "all -inf",
        }

        /// Values of [`FillParams::mirror`].
        MIRRORS as Mirror {
            MIRROR_NONE = 0: "rows as they come",
            MIRROR_EQUAL = 1: "rows that read the same from both ends",
            MIRROR_NEGATED = 2: "rows whose second half is the first from its end, negated",
        }
    }
    structs {
        /// An access that a kernel skipped, or scores from which nothing can be chosen. In pinned host memory mapped
        /// into the device's address space: the host reads it without a copy or a synchronisation. Protocol:
        /// `cuda/common.cuh`.
        FaultRecord {
            /// Written by the host: number of the fault that may be recorded next, counted from 1.
            epoch: u32,
            /// Written last by the device: the fields below are complete when it equals `epoch`.
            ready: u32,
            /// Kernel id ([`KERNELS`]).
            kernel: i32,
            /// Buffer id ([`BUFFERS`]).
            buffer: i32,
            /// Row of the batch.
            request: i32,
            /// Move, branch, step or node within the request; row of the operand; -1 where none applies.
            step: i32,
            /// The index that was computed; of a probe the column of the first offending value.
            index: i64,
            /// One past the largest allowed index; 0 for a probe.
            bound: i64,
            /// What a probe of scores found ([`PROBES`]); 0 for an access.
            probe: i32,
            /// Absolute position of the token that could not be drawn; -1 where none applies.
            position: i32,
        }

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
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
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

        /// Parameters of `cuda/attention.cu`, passed by value.
        AttentionParams {
            /// `[queries, kv_heads * group, head_dim]`.
            q: u64,
            /// `[num_slots, kv_heads, head_dim]`: keys of one layer.
            k: u64,
            /// As `k`: values.
            v: u64,
            /// As `q`; of `f32` where `out_f32` is 1.
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
            /// `int32[2 + 2 * requests]`: which items there are, from `attend` to `merge`.
            schedule: u64,
            /// `f32[slots, slot_rows, head_dim]`: sums of a split.
            partials: u64,
            /// `f32[slots, slot_rows, 2]`: maximum and row sum of a split.
            states: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
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
            /// Entries of the ring of K and V tiles.
            stages: i32,
            /// Bits of the `f32` factor from a score to an exponent of 2.
            scale_bits: u32,
            /// Pieces of 16 bytes of a slot of one plane; a plane's all are fewer than `u32::MAX`.
            slot_pieces: u32,
            /// Bits of the `f32` factor from a score to the exponent of e^2x in its tanh; 0 where scores have no cap.
            cap_bits: u32,
        }

        /// Parameters of `cuda/round_end.cu`, passed by value.
        RoundEndParams {
            /// `int32[batch + 1]`: first token of each lane's path.
            offsets: u64,
            /// `int32[entries]`: tokens drawn along accepted paths.
            tokens: u64,
            /// `int32[batch]`: committed lengths with the accepted nodes.
            new_lens: u64,
            /// `int32[batch]`: the next roots.
            roots_found: u64,
            /// `int32[batch]`: not 0 where the target's scores were no numbers.
            faults: u64,
            /// `int32[batch]`: sound draft steps.
            sound: u64,
            /// `int32`: live lanes.
            live: u64,
            /// `int32[batch]`: committed length at which a request has ended.
            limits: u64,
            /// `int32[batch]`: deepest level of drafts wanted.
            caps: u64,
            /// `int32[batch * places]`: tokens that end a request.
            stops: u64,
            /// `int32[batch]`: places used.
            stop_counts: u64,
            /// `int32[batch]`, in and out: committed lengths.
            lens: u64,
            /// `int32[batch]`, in and out: roots.
            roots: u64,
            /// `int32[batch]`, in and out: levels of drafts.
            depths: u64,
            /// `int32[batch]`, in and out: not 0 for a lane that has ended.
            done: u64,
            /// `int32[CONTROL_WORDS]`, in and out.
            control: u64,
            /// `int32[words]`: what the round found, for the host.
            found: u64,
            /// `int32[(slot_mask + 1) * slot_words]`: the ring, in mapped host memory.
            ring: u64,
            /// `int32` in mapped host memory: not 0 where the host asks for an end.
            stop: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// Handle of the conditional node that runs the rounds; 0 where there is none.
            handle: u64,
            /// Lanes.
            batch: i32,
            /// Capacity of `tokens`.
            entries: i32,
            /// Places for a lane's stop tokens.
            places: i32,
            /// Words of `found`.
            words: i32,
            /// Slots of the ring less one; the slots are a power of two.
            slot_mask: u32,
            /// Words from slot to slot.
            slot_words: i32,
            /// First word of the lengths in a slot.
            lens_at: i32,
            /// First word of the depths in a slot.
            depths_at: i32,
            /// First word of what the round found in a slot; a multiple of 4.
            found_at: i32,
            /// 1 where `found` can be read in vectors of 16 bytes.
            wide: u32,
        }

        /// Parameters of `gather_rows` in `cuda/rows.cu`, passed by value.
        GatherRowsParams {
            /// `[table_rows]` rows of `columns` vectors.
            table: u64,
            /// `[out_rows]` rows of `columns` vectors.
            out: u64,
            /// `int32[rows]`: where each row comes from; 0 where row i does from row i.
            indices: u64,
            /// `int32[rows]`: where each row goes, -1 for nowhere; 0 where row i goes to row i.
            targets: u64,
            /// `int32`: rows that are live; 0 where all are.
            live: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// Bytes from row to row of the table.
            table_stride: u64,
            /// Bytes from row to row of the output.
            out_stride: u64,
            /// Rows of the table.
            table_rows: i32,
            /// Rows of the output.
            out_rows: i32,
            /// Rows that are gathered.
            rows: i32,
            /// Vectors of a row.
            columns: u32,
            /// Added to each index.
            shift: i32,
            /// 1 where rows that come from nowhere leave the output as it is, 0 where they are zeros.
            keeps: u32,
            /// Kernel id of faults.
            kernel: i32,
            /// Buffer id of an index outside the table.
            buffer: i32,
        }

        /// Parameters of `add_rms_norm` in `cuda/rows.cu`, passed by value. Strides are elements from row to row.
        AddRmsNormParams {
            /// `[rows, columns]`, read and, with `x`, written.
            residual: u64,
            /// `[rows, columns]`; 0 where nothing is added.
            x: u64,
            /// `[columns]`.
            weight: u64,
            /// `[rows, columns]`; 0 where only the sum is wanted.
            out: u64,
            /// `[rows, columns]`: the residual again; 0 where it is not wanted.
            copy: u64,
            /// `int32`: rows that are live; 0 where all are.
            live: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// Of `residual`.
            residual_stride: u64,
            /// Of `x`.
            x_stride: u64,
            /// Of `out`.
            out_stride: u64,
            /// Of `copy`.
            copy_stride: u64,
            /// Rows.
            rows: i32,
            /// Elements of a row.
            columns: i32,
            /// Bits of the f32 added to the mean square.
            eps_bits: u32,
            /// 1 where every row of every operand can be read in vectors of 16 bytes.
            wide: u32,
            /// 1 where `weight` is of f32, 0 where it is of the element type.
            weight_f32: u32,
            /// Zero; keeps the size a multiple of 8.
            reserved: u32,
        }

        /// Parameters of `gated_up` in `cuda/rows.cu`, passed by value. Strides are elements from row to row.
        GatedUpParams {
            /// `[rows, 2 * columns]`.
            gate_up: u64,
            /// `[rows, columns]`.
            out: u64,
            /// `int32`: rows that are live; 0 where all are.
            live: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// Of `gate_up`.
            in_stride: u64,
            /// Of `out`.
            out_stride: u64,
            /// Rows.
            rows: i32,
            /// Elements of a row of the output.
            columns: i32,
            /// 1 for pairs gate, up, gate, up, ...; 0 for all gates before all ups.
            interleaved: u32,
            /// 1 where every row of every operand can be read in vectors of 16 bytes.
            wide: u32,
        }

        /// Parameters of `cuda/rope_kv.cu`, passed by value. Strides are elements from row to row.
        RopeKvParams {
            /// `[rows, (heads + 2 * kv_heads) * head_dim]`: queries, keys, values.
            qkv: u64,
            /// `[rows, heads * head_dim]`; 0 without query heads.
            q: u64,
            /// `[num_slots, kv_heads, head_dim]`: keys of the layer.
            cache_k: u64,
            /// As `cache_k`: values of the layer.
            cache_v: u64,
            /// `int32[rows]`.
            positions: u64,
            /// `int32[rows]`.
            slots: u64,
            /// `float[positions_in_table, half]`.
            cos: u64,
            /// `float[positions_in_table, half]`.
            sin: u64,
            /// `[(heads + 2 * kv_heads) * head_dim]`; 0 for none.
            bias: u64,
            /// `[head_dim]`; 0 for none.
            q_norm: u64,
            /// `[head_dim]`; 0 for none.
            k_norm: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// Of `qkv`.
            qkv_stride: u64,
            /// Of `q`.
            q_stride: u64,
            /// Rows.
            rows: i32,
            /// Query heads.
            heads: i32,
            /// Key heads, as many as value heads.
            kv_heads: i32,
            /// Elements of a head; even.
            head_dim: i32,
            /// Pairs that are rotated; at most `head_dim / 2`.
            half: i32,
            /// Rows of `cos` and `sin`.
            positions_in_table: i32,
            /// Slots of the cache; slot 0 is the sink.
            num_slots: i32,
            /// Bits of the f32 added to a head's mean square.
            eps_bits: u32,
            /// 1 where two neighbours of every operand can be read at once.
            wide: u32,
            /// 1 where the norms' weights are of f32, 0 where they are of the element type.
            norm_f32: u32,
        }

        /// Parameters of `cuda/verify_greedy.cu`, passed by value.
        VerifyParams {
            /// `[nodes, vocab]`.
            logits: u64,
            /// `int32[nodes]`: token of each node.
            tree_tokens: u64,
            /// `int32[nodes]`: parent of each node within its tree, -1 for a root.
            tree_parents: u64,
            /// `int32[requests + 1]`: first node of each tree.
            offsets: u64,
            /// `int32[requests]`: committed lengths.
            lens: u64,
            /// `int32`: requests that are live; 0 where all are.
            live: u64,
            /// `int32[requests + 1]`: first entry of each request in the three arrays below.
            out_offsets: u64,
            /// `int32[requests * max_path]`: accepted nodes.
            paths: u64,
            /// `int32[requests * max_path]`: the token drawn at each.
            tokens: u64,
            /// `int32[requests * max_path]`: the row of logits of each.
            rows: u64,
            /// `int32[requests]`: the last token, root of the next tree.
            roots: u64,
            /// `int32[requests]`: committed lengths after the round; may be `lens`.
            new_lens: u64,
            /// `int32[requests]`: what a probe found, or 0.
            faults: u64,
            /// `uint64[nodes]`: largest key of each row; 0 between launches.
            row_keys: u64,
            /// `int32[requests * max_path]`: accepted nodes, each request at its own place.
            walk_paths: u64,
            /// `int32[requests * max_path]`: tokens, likewise.
            walk_tokens: u64,
            /// `int32[requests]`: accepted nodes of each request.
            walk_lengths: u64,
            /// `uint32`: blocks that have finished; 0 between launches.
            counter: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// Elements from row to row of the logits.
            logits_stride: u64,
            /// Rows of logits, and capacity of the tree's arrays.
            nodes: i32,
            /// Requests.
            requests: i32,
            /// Columns of a row of logits.
            vocab: i32,
            /// Most nodes of one tree.
            max_nodes: i32,
            /// Most nodes of an accepted path.
            max_path: i32,
            /// Zero; keeps the size a multiple of 8.
            reserved: i32,
        }

        /// Parameters of `cuda/kv_commit.cu`, passed by value.
        KvCommitParams {
            /// `int32[requests + 1]`: first entry of each request in `paths`.
            offsets: u64,
            /// `int32[entries]`: accepted nodes.
            paths: u64,
            /// `int32[requests]`: lengths with the accepted nodes.
            new_lens: u64,
            /// `int32[table_rows, table_width]`: page ids by row and column.
            table: u64,
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
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// Requests.
            requests: i32,
            /// Capacity of `paths`.
            entries: i32,
            /// Rows of the page table.
            table_rows: i32,
            /// Columns of the page table.
            table_width: i32,
            /// Pages of the pool, the sink included.
            num_pages: i32,
            /// log2 of the tokens of a page.
            shift: i32,
            /// Most nodes of a tree; at most 1024.
            max_nodes: i32,
            /// Capacity of `src` and of `dst`.
            moves: i32,
        }

        /// Parameters of `cuda/draft_select.cu`, passed by value.
        DraftSelectParams {
            /// `[rows, draft_vocab]`; a row a request in step 0, `topk` rows a request later.
            logits: u64,
            /// `int32[draft_vocab]`: token of the target for each draft id; 0 where they are the same.
            to_target: u64,
            /// `int32`: requests that are live; 0 where all are.
            live: u64,
            /// `float[requests, candidates]`: cumulative log-probabilities.
            scores: u64,
            /// `int32[requests, candidates]`.
            candidate_tokens: u64,
            /// `int32[requests, candidates]`: parent candidate, -1 below the root.
            candidate_parents: u64,
            /// `int32[requests, topk]`: the candidate that each beam is.
            beams: u64,
            /// `int32[requests * topk]`: token of each beam.
            tokens: u64,
            /// `int32[requests * topk]`: row of the previous step that each beam continues.
            parents: u64,
            /// `uint64[requests * topk, words]`: draft slots of each beam's ancestors and of itself.
            ancestors: u64,
            /// `int32[requests]`: steps before the first fault.
            sound: u64,
            /// `uint64[rows, chunks, topk]`: the best keys of each chunk.
            lists: u64,
            /// `float2[rows, tiles]`: maximum and sum of each tile.
            partials: u64,
            /// `uint32[requests]`: blocks that have finished; 0 between launches.
            counters: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// Elements from row to row of the logits.
            logits_stride: u64,
            /// Requests.
            requests: i32,
            /// This step, 0-based.
            step: i32,
            /// K; at most 32.
            topk: i32,
            /// S.
            steps: i32,
            /// Candidates of a request, `topk + (steps - 1) * topk * topk`.
            candidates: i32,
            /// Columns of a row of logits.
            draft_vocab: i32,
            /// The target's vocabulary.
            vocab: i32,
            /// Blocks that share a row.
            chunks: i32,
            /// Tiles of a row.
            tiles: i32,
            /// Zero; keeps the size a multiple of 8.
            reserved: i32,
        }

        /// Parameters of `cuda/tree_build.cu`, passed by value.
        TreeBuildParams {
            /// `float[requests, candidates]`.
            scores: u64,
            /// `int32[requests, candidates]`.
            candidate_tokens: u64,
            /// `int32[requests, candidates]`.
            candidate_parents: u64,
            /// `int32[requests]`: steps before the first fault.
            sound: u64,
            /// `int32[requests]`: token of each root.
            roots: u64,
            /// `int32[requests]`.
            max_depths: u64,
            /// `int32[requests]`, root included.
            max_nodes: u64,
            /// `float`: least score of a node; 0 for none.
            min_score: u64,
            /// `int32`: requests that are live; 0 where all are.
            live: u64,
            /// `int32[requests + 1]`: first node of each tree.
            offsets: u64,
            /// `int32[requests * draft_tokens]`, as the arrays below.
            tokens: u64,
            /// Depth of each node.
            depths: u64,
            /// Parent of each node within its tree, -1 for a root.
            parents: u64,
            /// First child, -1 for none.
            next_child: u64,
            /// Next child of the same parent, -1 for none.
            next_sibling: u64,
            /// `float`: score of each node.
            node_scores: u64,
            /// `uint64[requests * draft_tokens, words]`: ancestors of each node and itself; 0 where not wanted.
            masks: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// Requests.
            requests: i32,
            /// K.
            topk: i32,
            /// S.
            steps: i32,
            /// V.
            draft_tokens: i32,
            /// Candidates of a request; at most 4096.
            candidates: i32,
            /// Zero; keeps the size a multiple of 8.
            reserved: i32,
        }

        /// Parameters of `cuda/tree_unite.cu`, passed by value. Of two batches of trees, own ones and others.
        TreeUniteParams {
            /// `int32[requests + 1]`: first node of each own tree.
            own_offsets: u64,
            /// `int32[requests * draft_tokens]`.
            own_tokens: u64,
            /// `int32[requests * draft_tokens]`: parent of each node within its tree, -1 for a root.
            own_parents: u64,
            /// `float[requests * draft_tokens]`: cumulative log-probability of each node.
            own_scores: u64,
            /// As `own_offsets`.
            other_offsets: u64,
            /// As `own_tokens`.
            other_tokens: u64,
            /// As `own_parents`.
            other_parents: u64,
            /// As `own_scores`.
            other_scores: u64,
            /// `int32[requests]`: token of each root.
            roots: u64,
            /// `int32[requests]`, root included.
            max_nodes: u64,
            /// `int32`: requests that are live; 0 where all are.
            live: u64,
            /// `int32[requests + 1]`: first node of each tree.
            offsets: u64,
            /// `int32[requests * draft_tokens]`, as the arrays below.
            tokens: u64,
            /// Depth of each node.
            depths: u64,
            /// Parent of each node within its tree, -1 for a root.
            parents: u64,
            /// First child, -1 for none.
            next_child: u64,
            /// Next child of the same parent, -1 for none.
            next_sibling: u64,
            /// `float`: score of each node.
            node_scores: u64,
            /// `uint64[requests * draft_tokens, words]`: ancestors of each node and itself; 0 where not wanted.
            masks: u64,
            /// Whose a node is: bit 0 an own one, bit 1 the other tree's.
            origins: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// Requests.
            requests: i32,
            /// V; at most 64.
            draft_tokens: i32,
        }

        /// Sampling parameters of a request, as `cuda/sample.cu` reads them: `SamplerConfig`, prepared.
        SamplerRow {
            /// Key of the random numbers.
            seed: u64,
            /// Smallest weight that min-p keeps.
            min_weight: u64,
            /// Bits of the float64 top-p.
            top_p: u64,
            /// Keep the k largest logits; 0 keeps all.
            top_k: u32,
            /// Bits of the float32 inverse of the temperature; 0 for temperature 0, greedy.
            inv_t: u32,
            /// Bits of the float32 repetition penalty.
            repetition: u32,
            /// Bits of the float32 presence penalty.
            presence: u32,
            /// Bits of the float32 frequency penalty.
            frequency: u32,
            /// 1 where a penalty does anything, else 0.
            penalises: u32,
        }

        /// Parameters of `cuda/sample.cu`, passed by value. The trees and the walks are as in `VerifyParams`.
        SampleParams {
            /// `[nodes]` rows of `vocab` logits, float32, bfloat16 or float16, `logits_stride` elements apart.
            logits: u64,
            /// `int32[requests + 1]`: the nodes of each request.
            offsets: u64,
            /// `int32[nodes]`: parent of each node, within its tree; -1 for a root.
            tree_parents: u64,
            /// `int32[nodes]`: token of each node.
            tree_tokens: u64,
            /// `int32[requests]`: committed lengths.
            lens: u64,
            /// `int32`: live requests; 0: all are.
            live: u64,
            /// [`SamplerRow`] of each request.
            samplers: u64,
            /// `int32[requests]`: first entry of each request's edits.
            edit_begins: u64,
            /// `int32[requests]`: entries of each request's edits.
            edit_counts: u64,
            /// `int32[edits]`: tokens, ascending within a request.
            edit_tokens: u64,
            /// `float32[edits]`: bias of the token, 0 for none.
            edit_biases: u64,
            /// `int32[edits]`: times that the token is in the output; 0 where it is in the prompt alone, -1 where in neither.
            edit_outputs: u64,
            /// `uint64[nodes]`: what was drawn at each node (mode full); 0 between launches.
            row_keys: u64,
            /// `int32[requests * max_path]`: nodes of each walk.
            walk_paths: u64,
            /// `int32[requests * max_path]`: token drawn at each node of a walk.
            walk_tokens: u64,
            /// `int32[requests]`: nodes of each walk.
            walk_lengths: u64,
            /// `uint32`: 0 between launches.
            counter: u64,
            /// `int32[requests + 1]`: where each request's entries start in the three arrays that follow.
            out_offsets: u64,
            /// `int32[requests * max_path]`: accepted nodes; 0 behind the last.
            paths: u64,
            /// `int32[requests * max_path]`: tokens drawn at them; -1 where none could be, and behind the last.
            tokens: u64,
            /// `int32[requests * max_path]`: their rows of the logits; 0 behind the last.
            rows: u64,
            /// `int32[requests]`: last token of each walk, the next root; 0 for a dead request.
            roots: u64,
            /// `int32[requests]`: length plus nodes of the walk; 0 for a dead request.
            new_lens: u64,
            /// `int32[requests]`: why a walk ended without a token ([`PROBES`]).
            faults: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// Elements from a row of logits to the next.
            logits_stride: u64,
            /// Columns of a row of logits.
            vocab: i32,
            /// Capacity of the arrays of nodes.
            nodes: i32,
            /// Rows of the batch.
            requests: i32,
            /// Most nodes of a tree.
            max_nodes: i32,
            /// Entries that a walk has room for.
            max_path: i32,
            /// Capacity of the arrays of edits.
            edits: i32,
        }

        /// Parameters of `plan_native` in `cuda/plan.cu`, passed by value.
        PlanParams {
            /// `int32[batch]`: row of each request in the page table; negative for a dead one.
            rows: u64,
            /// `uint64[batch]`: version of each row.
            versions: u64,
            /// `int32[batch]`: committed length of each request; where its tokens start.
            lens: u64,
            /// `int32[batch + 1]`: differences are the tokens of each request (extend) or the nodes of its tree (verify), which
            /// lie in `parents` from there; 0 in other phases.
            offsets: u64,
            /// `int32[parents_len]`: parent of each node within its tree (verify); 0 in other phases.
            parents: u64,
            /// `uint64[batch * topk * words]`: draft slots that each branch attends to (draft); 0: its lane.
            ancestors: u64,
            /// `int32[table_rows * row_pages]`: the pool's page table.
            table: u64,
            /// `int32`: live requests; 0: all are that have a row.
            live: u64,
            /// `int32[batch]`: rows of the plan.
            out_rows: u64,
            /// `uint64[batch]`: versions of the plan.
            out_versions: u64,
            /// `int32[batch + 1]`.
            qo_indptr: u64,
            /// `int32[batch]`.
            prefix_lens: u64,
            /// `int32[queries]`.
            positions: u64,
            /// `int32[queries]`.
            out_slots: u64,
            /// `uint64[queries * words]`.
            mask: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// Entries of `parents`.
            parents_len: i64,
            /// The step, field by field: `plan::form::Step`.
            phase: u32,
            /// t of a draft step.
            step: u32,
            /// log2 of P.
            shift: u32,
            /// K.
            topk: u32,
            /// S.
            steps: u32,
            /// V.
            nodes: u32,
            /// `max_context_len`.
            context: u32,
            /// 1 in the holey layout.
            holey: u32,
            /// Requests of the bucket.
            batch: i32,
            /// Queries of the bucket.
            queries: i32,
            /// Rows of the page table.
            table_rows: i32,
            /// Columns of the page table.
            row_pages: i32,
            /// Pages of the pool, the sink included.
            num_pages: i32,
            /// Zero; keeps the size a multiple of 8.
            reserved: i32,
        }

        /// Parameters of `plan_tail_copies` in `cuda/plan.cu`, passed by value.
        TailCopyParams {
            /// `int32[batch]`: row of each request in the page table; negative for a dead one.
            rows: u64,
            /// `int32[batch]`: committed length of each request.
            lens: u64,
            /// `int32[table_rows * row_pages]`: the pool's page table.
            table: u64,
            /// `int32`: live requests; 0: all are that have a row.
            live: u64,
            /// `int32[copies]`: source slots; 0 behind the last.
            src: u64,
            /// `int32[copies]`: destination slots; 0, the sink, behind the last.
            dst: u64,
            /// `int32[batch + 1]`: the copies of each request.
            offsets: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// log2 of P.
            shift: u32,
            /// K.
            topk: u32,
            /// S.
            steps: u32,
            /// `max_context_len`.
            context: u32,
            /// 1 in the holey layout.
            holey: u32,
            /// Requests of the bucket.
            batch: i32,
            /// Rows of the page table.
            table_rows: i32,
            /// Columns of the page table.
            row_pages: i32,
            /// Pages of the pool, the sink included.
            num_pages: i32,
            /// Capacity of `src` and of `dst`.
            copies: i32,
        }

        /// Parameters of `cuda/plan_lists.cu`, passed by value. Optional arrays have address 0 where they are not wanted.
        PlanListParams {
            /// `int32[batch]`: rows of the plan.
            rows: u64,
            /// `int32[batch + 1]`.
            qo_indptr: u64,
            /// `int32[batch]`.
            prefix_lens: u64,
            /// `int32[queries]`.
            out_slots: u64,
            /// `uint64[queries * words]`.
            mask: u64,
            /// `int32[table_rows * row_pages]`: the pool's page table.
            table: u64,
            /// `int32[lists + 1]`.
            kv_indptr: u64,
            /// `[indices]`, int32 or int64.
            kv_indices: u64,
            /// `int32[lists]`; optional.
            last_page_len: u64,
            /// `[batch + 1]`, int32 or int64; optional.
            qo_out: u64,
            /// `int64[queries]`; optional.
            extend_slots: u64,
            /// `[batch + 1]`, int32 or int64; with `custom_mask`.
            mask_indptr: u64,
            /// `uint8[mask_elements]`; optional.
            custom_mask: u64,
            /// `int32[batch + 1]`; with `packed_mask`.
            packed_indptr: u64,
            /// `uint8[packed_bytes]`; optional.
            packed_mask: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// Capacity of `kv_indices`.
            indices: i64,
            /// Capacity of `custom_mask`.
            mask_elements: i64,
            /// Capacity of `packed_mask`.
            packed_bytes: i64,
            /// The step, field by field: `plan::form::Step`.
            phase: u32,
            /// t of a draft step.
            step: u32,
            /// log2 of P.
            shift: u32,
            /// K.
            topk: u32,
            /// S.
            steps: u32,
            /// V.
            nodes: u32,
            /// `max_context_len`.
            context: u32,
            /// 1 in the holey layout.
            holey: u32,
            /// Requests of the plan.
            batch: i32,
            /// Queries of the plan.
            queries: i32,
            /// Rows of the page table.
            table_rows: i32,
            /// Columns of the page table.
            row_pages: i32,
            /// Pages of the pool, the sink included.
            num_pages: i32,
            /// 1 for int64 where the two formats differ, 0 for int32.
            wide: u32,
            /// 1 where the list of a request names its own tokens, too.
            own: u32,
            /// Zero; keeps the size a multiple of 8.
            reserved: u32,
        }

        /// Parameters of `cuda/plan_tables.cu`, passed by value. The arrays of the expand pass have address 0 where the phase has
        /// none.
        PlanTableParams {
            /// `int32[batch]`: rows of the plan.
            rows: u64,
            /// `int32[batch + 1]`.
            qo_indptr: u64,
            /// `int32[batch]`.
            prefix_lens: u64,
            /// `int32[queries]`.
            out_slots: u64,
            /// `uint64[queries * words]`.
            mask: u64,
            /// `int32[table_rows * row_pages]`: the pool's page table.
            table: u64,
            /// `int32[batch]`.
            cache_seqlens: u64,
            /// `int32[batch * page_columns]`.
            page_table: u64,
            /// `int32[batch + 1]`.
            cu_seqlens_q: u64,
            /// `int32[queries]`.
            expand_cache_seqlens: u64,
            /// `int32[queries * expand_columns]`.
            expand_page_table: u64,
            /// `int32[queries + 1]`.
            expand_cu_seqlens_q: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// The step, field by field: `plan::form::Step`.
            phase: u32,
            /// t of a draft step.
            step: u32,
            /// log2 of P.
            shift: u32,
            /// K.
            topk: u32,
            /// S.
            steps: u32,
            /// V.
            nodes: u32,
            /// `max_context_len`.
            context: u32,
            /// 1 in the holey layout.
            holey: u32,
            /// Requests of the plan.
            batch: i32,
            /// Queries of the plan.
            queries: i32,
            /// Rows of the page table.
            table_rows: i32,
            /// Columns of the page table.
            row_pages: i32,
            /// Pages of the pool, the sink included.
            num_pages: i32,
            /// Columns of `page_table`.
            page_columns: i32,
            /// Columns of `expand_page_table`.
            expand_columns: i32,
            /// Zero; keeps the size a multiple of 8.
            reserved: i32,
        }

        /// Parameters of `cuda/table_update.cu`, passed by value; a block a change.
        TableUpdateParams {
            /// `int32[rows][width]`.
            table: u64,
            /// `int32[staged_words]`: heads of four words, then page ids.
            staged: u64,
            /// [`FaultRecord`] in mapped host memory.
            record: u64,
            /// `uint32` in device memory: the last epoch whose record was claimed.
            claim: u64,
            /// Rows of the table.
            rows: i32,
            /// Columns of the table.
            width: i32,
            /// One past the largest page id.
            num_pages: i32,
            /// Words of the staging slot.
            staged_words: i32,
        }

        /// Parameters of `cuda/loop_count.cu`, passed by value; one thread.
        LoopCountParams {
            /// `int32[1]`: iterations left, this one included.
            left: u64,
            /// `int32[1]`: anything but 0 ends the loop; null for none.
            stop: u64,
            /// The loop's condition.
            handle: u64,
        }

        /// Parameters of `fill_random` in `cuda/fingerprint.cu`, passed by value.
        FillParams {
            /// `bf16[count]` or `f16[count]`.
            out: u64,
            /// Elements, whole rows.
            count: u64,
            /// Elements of a row.
            cols: u32,
            /// Chooses the values.
            seed: u32,
            /// Added to the exponents, which are -8 to 7; -32 to 8.
            exponent: i32,
            /// 1 for f16, 0 for bf16.
            f16: u32,
            /// Mirror id ([`MIRRORS`]).
            mirror: i32,
            /// Zero; keeps the size a multiple of 8.
            reserved: u32,
        }

        /// Parameters of `row_fingerprint` in `cuda/fingerprint.cu`, passed by value; a block a row.
        FingerprintParams {
            /// Rows of `row_units` units of 16 bits.
            data: u64,
            /// `uint64[rows]`.
            out: u64,
            /// Units of a row.
            row_units: u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `(name, offset)` of the fields that the header's struct `name` has, and its size, by the rules of C.
    fn layout_in_header(name: &str) -> (Vec<(String, usize)>, usize) {
        let body = HEADER.split(&format!("struct {name} {{\n")).nth(1).unwrap().split("};").next().unwrap();
        let (mut fields, mut end) = (vec![], 0usize);
        for line in body.lines().map(str::trim).filter(|l| !l.starts_with("//")) {
            let (ty, field) = line.strip_suffix(';').unwrap().split_once(' ').unwrap();
            let size = if ty.contains("64") { 8 } else { 4 };
            end = end.next_multiple_of(size);
            fields.push((field.to_owned(), end));
            end += size;
        }
        (fields, end.next_multiple_of(8))
    }

    macro_rules! assert_same_layout {
        ($name:ident { $($field:ident @ $offset:literal)+ } $size:literal) => {
            let want = [$((stringify!($field).to_owned(), $offset)),+];
            assert_eq!(layout_in_header(stringify!($name)), (want.to_vec(), $size));
            assert_eq!(([$(offset_of!($name, $field)),+], size_of::<$name>()), ([$($offset),+], $size));
        };
    }

    #[test]
    fn header_and_structs_have_one_layout() {
        assert_same_layout!(FaultRecord {
            epoch @ 0 ready @ 4 kernel @ 8 buffer @ 12 request @ 16 step @ 20 index @ 24 bound @ 32 probe @ 40
            position @ 44
        } 48);
        assert_same_layout!(KvMoveParams {
            cache @ 0 src @ 8 dst @ 16 offsets @ 24 record @ 32 claim @ 40 plane_bytes @ 48 num_slots @ 56 moves @ 60
            requests @ 64 planes @ 68 columns @ 72 reserved @ 76
        } 80);
        assert_same_layout!(TableUpdateParams {
            table @ 0 staged @ 8 record @ 16 claim @ 24 rows @ 32 width @ 36 num_pages @ 40 staged_words @ 44
        } 48);
        assert_same_layout!(LoopCountParams { left @ 0 stop @ 8 handle @ 16 } 24);
        assert_same_layout!(FillParams {
            out @ 0 count @ 8 cols @ 16 seed @ 20 exponent @ 24 f16 @ 28 mirror @ 32 reserved @ 36
        } 40);
        assert_same_layout!(FingerprintParams { data @ 0 out @ 8 row_units @ 16 } 24);
    }

    #[test]
    fn ids_are_those_of_the_header() {
        for (name, table) in [("Kernel", KERNELS), ("Buffer", BUFFERS), ("Probe", PROBES), ("Mirror", MIRRORS)] {
            let body = HEADER.split(&format!("enum {name} : int32_t {{\n")).nth(1).unwrap().split("};").next().unwrap();
            let values = body.lines().map(|l| l.split_once(" = ").unwrap().1.split_once(",  // ").unwrap());
            let values: Vec<(i32, &str)> = values.map(|(v, text)| (v.parse().unwrap(), text)).collect();
            assert_eq!(values, table, "{name}");
        }
    }
}
