//! The kernels of `plan`, `plan_lists` and `plan_tables`: a step, the plan of it, and what formats make of that.

use super::faults::Report;
use super::table::PageTable;

declare! {
    ids {
        Kernel {
            KERNEL_PLAN = 31: "plan",
            KERNEL_PLAN_LISTS = 32: "plan_lists",
            KERNEL_PLAN_TABLES = 33: "plan_tables",
            KERNEL_TAIL_COPIES = 34: "tail_copies",
        }
        Buffer {
            BUFFER_LENGTHS = 64: "committed lengths",
            BUFFER_COUNTS = 65: "tokens of a request",
            BUFFER_CONTEXT = 67: "context",
            BUFFER_QUERIES = 68: "queries",
            BUFFER_ANCESTORS = 70: "ancestor bits",
            BUFFER_ALLOCATED = 71: "allocated positions",
            BUFFER_POOL_PAGES = 72: "pool pages",
            BUFFER_COPIES = 73: "src and dst (tail copies)",
            BUFFER_KV_INDICES = 74: "kv_indices",
            BUFFER_CUSTOM_MASK = 75: "custom_mask",
            BUFFER_PACKED_MASK = 76: "packed_custom_mask",
            BUFFER_PREFIX_TABLE = 77: "page_table",
            BUFFER_EXPAND_TABLE = 78: "expand_page_table",
        }
    }
    structs {
        /// A step of a round and the geometry that places it: `plan::form::Step`.
        Step {
            /// `EXTEND`, `DECODE`, `DRAFT` or `VERIFY`.
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
        }

        /// Parts that formats are made of: arrays of a plan and their sizes, those of the bucket.
        PlanArrays {
            /// `int32[batch]`: row of each request in the page table, -1 for a dead one.
            rows: u64,
            /// `int32[batch + 1]`.
            qo_indptr: u64,
            /// `int32[batch]`.
            prefix_lens: u64,
            /// `int32[queries]`.
            out_slots: u64,
            /// `uint64[queries * words]`.
            mask: u64,
            /// Requests.
            batch: i32,
            /// Queries.
            queries: i32,
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
            /// Page table of the pool.
            table: PageTable,
            /// `int32`: live requests; 0: all are that have a row.
            live: u64,
            /// Written.
            plan: PlanArrays,
            /// `uint64[batch]`: versions of the plan.
            out_versions: u64,
            /// `int32[queries]`.
            positions: u64,
            /// Destination of faults.
            report: Report,
            /// Entries of `parents`.
            parents_len: i64,
            /// Step that is planned.
            step: Step,
        }

        /// Parameters of `plan_tail_copies` in `cuda/plan.cu`, passed by value.
        TailCopyParams {
            /// `int32[batch]`: row of each request in the page table; negative for a dead one.
            rows: u64,
            /// `int32[batch]`: committed length of each request.
            lens: u64,
            /// Page table of the pool.
            table: PageTable,
            /// `int32`: live requests; 0: all are that have a row.
            live: u64,
            /// `int32[copies]`: source slots; 0 behind the last.
            src: u64,
            /// `int32[copies]`: destination slots; 0, the sink, behind the last.
            dst: u64,
            /// `int32[batch + 1]`: the copies of each request.
            offsets: u64,
            /// Destination of faults.
            report: Report,
            /// A draft step, of which the phase is not read.
            step: Step,
            /// Requests of the bucket.
            batch: i32,
            /// Capacity of `src` and of `dst`.
            copies: i32,
        }

        /// Parameters of `cuda/plan_lists.cu`, passed by value. Optional arrays have address 0 where they are not wanted.
        PlanListParams {
            /// Read.
            plan: PlanArrays,
            /// Page table of the pool.
            table: PageTable,
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
            /// Destination of faults.
            report: Report,
            /// Capacity of `kv_indices`.
            indices: i64,
            /// Capacity of `custom_mask`.
            mask_elements: i64,
            /// Capacity of `packed_mask`.
            packed_bytes: i64,
            /// Step that is planned.
            step: Step,
            /// 1 for int64 where the two formats differ, 0 for int32.
            wide: u32,
            /// 1 where the list of a request names its own tokens, too.
            own: u32,
        }

        /// Parameters of `cuda/plan_tables.cu`, passed by value. The arrays of the expand pass have address 0 where the phase has
        /// none.
        PlanTableParams {
            /// Read.
            plan: PlanArrays,
            /// Page table of the pool.
            table: PageTable,
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
            /// Destination of faults.
            report: Report,
            /// Step that is planned.
            step: Step,
            /// Columns of `page_table`.
            page_columns: i32,
            /// Columns of `expand_page_table`.
            expand_columns: i32,
        }
    }
}
