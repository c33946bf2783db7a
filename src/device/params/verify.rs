//! `verify_greedy` and `sample`: what both read and write, and by what tokens are drawn.

use super::faults::Report;

declare! {
    ids {
        Kernel {
            KERNEL_VERIFY_GREEDY = 21: "verify_greedy",
            KERNEL_SAMPLE_VERIFY = 30: "sample_verify",
        }
        Buffer {
            BUFFER_TARGET_LOGITS = 50: "target logits",
            BUFFER_EDITED_LOGITS = 60: "target logits after logit_bias and penalties",
            BUFFER_EDITS = 61: "edits",
            BUFFER_EDIT_TOKENS = 62: "edits (tokens)",
            BUFFER_SAMPLERS = 63: "samplers",
        }
    }
    structs {
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
            /// `int32[requests]`: what a probe found (`Probe`), or 0.
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
            /// Destination of faults.
            report: Report,
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

        /// Parameters of `cuda/sample.cu`, passed by value.
        SampleParams {
            /// The trees, their logits and the walks.
            verify: VerifyParams,
            /// `SamplerRow[requests]`.
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
            /// Capacity of the arrays of edits.
            edits: i32,
            /// Logits of a row that a warp holds in shared memory; a multiple of 128.
            piece: i32,
        }
    }
}
