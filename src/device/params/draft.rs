//! `draft_select`, `tree_build` and `tree_unite`, `tree_lists` and `list_beams`: from draft logits to the trees of a batch.

use super::faults::Report;

declare! {
    ids {
        Kernel {
            KERNEL_DRAFT_SELECT = 23: "draft_select",
            KERNEL_TREE_BUILD = 24: "tree_build",
            KERNEL_TREE_UNITE = 25: "tree_unite",
            KERNEL_TREE_LISTS = 26: "tree_lists",
            KERNEL_BLOCK_ROWS = 27: "block_rows",
            KERNEL_LIST_BEAMS = 28: "list_beams",
        }
        Buffer {
            BUFFER_BEAMS = 45: "candidates (beam)",
            BUFFER_TARGET_IDS = 46: "vocabulary (d2t target id)",
            BUFFER_CANDIDATE_PARENTS = 47: "candidates (parent)",
            BUFFER_SOUND = 48: "sound steps",
            BUFFER_MAX_NODES = 49: "max_nodes",
            BUFFER_TOKENS_BEFORE = 52: "tokens before (rows of their table)",
            BUFFER_DRAFT_LOGITS = 51: "draft logits",
        }
    }
    structs {
        /// Candidates of the draft steps.
        Drafts {
            /// `float[requests, candidates]`: cumulative log-probabilities.
            scores: u64,
            /// `int32[requests, candidates]`.
            tokens: u64,
            /// `int32[requests, candidates]`: parent candidate, -1 below the root.
            parents: u64,
            /// `int32[requests]`: steps before the first fault.
            sound: u64,
            /// K; at most 32 where they are selected.
            topk: i32,
            /// S.
            steps: i32,
            /// Candidates of a request, `topk + (steps - 1) * topk * topk`; at most 4096 where a tree is built of them.
            candidates: i32,
            /// Zero; keeps the size a multiple of 8.
            reserved: i32,
        }

        /// The trees of a batch that a kernel makes, and what it makes them by.
        Trees {
            /// Read, `int32[requests]`: token of each root.
            roots: u64,
            /// Read, `int32[requests]`: most nodes, root included.
            max_nodes: u64,
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
            scores: u64,
            /// `uint64[requests * draft_tokens, words]`: ancestors of each node and itself; 0 where not wanted.
            masks: u64,
            /// Requests.
            requests: i32,
            /// V.
            draft_tokens: i32,
        }

        /// Trees of a batch that a kernel reads.
        GivenTrees {
            /// `int32[requests + 1]`: first node of each tree.
            offsets: u64,
            /// `int32[requests * draft_tokens]`.
            tokens: u64,
            /// `int32[requests * draft_tokens]`: parent of each node within its tree, -1 for a root.
            parents: u64,
            /// `float[requests * draft_tokens]`: cumulative log-probability of each node.
            scores: u64,
        }

        /// Parameters of `cuda/draft_select.cu`, passed by value.
        DraftSelectParams {
            /// `[rows, draft_vocab]`; a row a request in step 0, `topk` rows a request later.
            logits: u64,
            /// `int32[draft_vocab]`: token of the target for each draft id; 0 where they are the same.
            to_target: u64,
            /// `int32`: requests that are live; 0 where all are.
            live: u64,
            /// Written, and read from step 1 on.
            drafts: Drafts,
            /// `int32[requests, topk]`: the candidate that each beam is.
            beams: u64,
            /// `int32[requests * topk]`: token of each beam.
            tokens: u64,
            /// `int32[requests * topk]`: row of the previous step that each beam continues.
            parents: u64,
            /// `uint64[requests * topk, words]`: draft slots of each beam's ancestors and of itself.
            ancestors: u64,
            /// `uint64[rows, chunks, topk]`: the best keys of each chunk.
            lists: u64,
            /// `float2[rows, tiles]`: maximum and sum of each tile.
            partials: u64,
            /// `uint32[requests]`: blocks that have finished; 0 between launches.
            counters: u64,
            /// Destination of faults.
            report: Report,
            /// Elements from row to row of the logits.
            logits_stride: u64,
            /// Requests.
            requests: i32,
            /// Columns of a row of logits.
            draft_vocab: i32,
            /// The target's vocabulary.
            vocab: i32,
            /// Blocks that share a row.
            chunks: i32,
            /// Tiles of a row.
            tiles: i32,
            /// This step, 0-based.
            step: i32,
        }

        /// Parameters of `cuda/tree_build.cu`, passed by value.
        TreeBuildParams {
            /// Read.
            drafts: Drafts,
            /// Written.
            trees: Trees,
            /// `int32[requests]`.
            max_depths: u64,
            /// `float`: least score of a node; 0 for none.
            min_score: u64,
            /// `int32`: requests that are live; 0 where all are.
            live: u64,
            /// Destination of faults.
            report: Report,
        }

        /// Parameters of `cuda/tree_unite.cu`, passed by value. V is at most 64.
        TreeUniteParams {
            /// The trees that the device drafted.
            own: GivenTrees,
            /// Trees of the host.
            other: GivenTrees,
            /// Written.
            trees: Trees,
            /// `int32`: requests that are live; 0 where all are.
            live: u64,
            /// `int32[requests * draft_tokens]`: whose a node is: bit 0 an own one, bit 1 the other tree's.
            origins: u64,
            /// Destination of faults.
            report: Report,
        }

        /// Parameters of `block_rows` of `cuda/tree_lists.cu`, passed by value.
        BlockRowsParams {
            /// `int32[requests]`: committed positions.
            lens: u64,
            /// `int32[requests]`: token of each root.
            roots: u64,
            /// `int32[requests]`: deepest useful level; 0 of a request that does not draft.
            depths: u64,
            /// `int32[requests]`: most nodes of a tree.
            nodes: u64,
            /// `float[requests]`: factor on a request's scores.
            heats: u64,
            /// `int32`: requests that are live; 0 where all are.
            live: u64,
            /// Written, `int32[requests + 1]`: first row of each block.
            offsets: u64,
            /// Written, `int32[requests * rows]`.
            tokens: u64,
            /// Written, `uint64[requests * rows]`: the rows of the block, as bits.
            masks: u64,
            /// Written, `int32[requests * levels]`: the row that predicts each level; row 0 where none does.
            wanted: u64,
            /// Written, `float[requests * levels]`: the factor of each level's scores.
            row_heats: u64,
            /// Written, `int32[requests]`: levels that the block predicts, of which `depths` are of use.
            levels_out: u64,
            /// Written, `int32[requests]`: `nodes`, of which there are at most `most`.
            nodes_out: u64,
            /// Destination of faults.
            report: Report,
            /// Requests.
            requests: i32,
            /// Rows of a block, at most 64.
            rows: i32,
            /// Levels of a request.
            levels: i32,
            /// Rows of a block before the one that predicts the first level; -1 if no row does.
            skipped: i32,
            /// Positions of a request.
            context: i32,
            /// Most nodes of a tree of this round.
            most: i32,
            /// Token of the rows behind the first.
            mask_token: i32,
            /// Zero; keeps the size a multiple of 8.
            reserved: i32,
        }

        /// Parameters of `tree_lists` of `cuda/tree_lists.cu`, passed by value. V is at most 64.
        TreeListsParams {
            /// `float[requests * levels, width]`: log-probabilities, best first.
            scores: u64,
            /// `int32[requests * levels, width]`, in the draft vocabulary.
            ids: u64,
            /// `int32[requests * levels]`: 0 of a list without a distribution.
            sound: u64,
            /// `int32[draft_vocab]`: token of the target for each draft id; 0 where they are the same.
            to_target: u64,
            /// `int32[requests]`.
            max_depths: u64,
            /// `int32`: requests that are live; 0 where all are.
            live: u64,
            /// Written.
            trees: Trees,
            /// Written, `int32[requests]`: 0 of a request with a level without a distribution.
            sound_out: u64,
            /// Destination of faults.
            report: Report,
            /// Levels of a request.
            levels: i32,
            /// Tokens of a list.
            width: i32,
            /// Draft vocabulary.
            draft_vocab: i32,
            /// Zero; keeps the size a multiple of 8.
            reserved: i32,
        }

        /// Parameters of `cuda/list_beams.cu`, passed by value.
        ListBeamsParams {
            /// `float[requests * levels, width]`: log-probabilities, best first.
            scores: u64,
            /// `int32[requests * levels, width]`, in the draft vocabulary.
            ids: u64,
            /// `int32[requests * levels]`: 0 of a list without a distribution.
            sound: u64,
            /// `float[requests * levels]`: factor on what scores change by.
            heats: u64,
            /// `int32[draft_vocab]`: token of the target for each draft id; 0 where they are the same.
            to_target: u64,
            /// `int32[requests]`.
            max_depths: u64,
            /// `int32[requests]`: token of each root.
            roots: u64,
            /// `int32`: requests that are live; 0 where all are.
            live: u64,
            /// `[vocab, rank]` of 16-bit elements: rows of tokens before.
            before: u64,
            /// `[draft_vocab, rank]`: rows of tokens that are scored.
            behind: u64,
            /// `[requests * levels, rank]`: factors on the elements of both rows' product; 0 where all are 1.
            weights: u64,
            /// Written.
            drafts: Drafts,
            /// Destination of faults.
            report: Report,
            /// Requests.
            requests: i32,
            /// Levels of a request.
            levels: i32,
            /// Tokens of a list, at most 32.
            width: i32,
            /// Draft vocabulary.
            draft_vocab: i32,
            /// The target's vocabulary.
            vocab: i32,
            /// Elements of a row of either table, a multiple of 8.
            rank: i32,
            /// 1 where no token has a chance but those that are listed.
            closed: u32,
            /// Makes the size a multiple of 8.
            reserved: u32,
        }
    }
}
