//! The record of a fault, where a kernel finds it, and the buffers that faults of several families name.

declare! {
    ids {
        Probe {
            PROBE_NONE = 0: "none",
            PROBE_NAN = 1: "NaN",
            PROBE_POSITIVE_INFINITY = 2: "+inf",
            PROBE_ALL_NEGATIVE_INFINITY = 3: "all -inf",
        }
        Buffer {
            BUFFER_LIVE = 32: "live",
            BUFFER_TREES = 37: "nodes of all trees",
            BUFFER_OFFSETS_DECREASE = 38: "offsets (decreasing)",
            BUFFER_TREE = 39: "nodes of a tree",
            BUFFER_PATH = 40: "accepted path",
            BUFFER_TREE_PARENTS = 69: "tree parents",
        }
    }
    structs {
        /// Destination of a launch's faults.
        Report {
            /// Two [`FaultRecord`]s in mapped host memory: of accesses, then of probes.
            record: u64,
            /// `uint32` in device memory, one a record: the last epoch whose record was claimed.
            claim: u64,
        }

        /// An access that a kernel skipped, or scores from which nothing can be chosen. In pinned host memory mapped
        /// into the device's address space: the host reads it without a copy or a synchronisation. Protocol:
        /// `cuda/common.cuh`.
        FaultRecord {
            /// Written by the host: number of the fault that may be recorded next, counted from 1.
            epoch: u32,
            /// Written last by the device: the fields below are complete when it equals `epoch`.
            ready: u32,
            /// Kernel id (`Kernel`).
            kernel: i32,
            /// Buffer id (`Buffer`).
            buffer: i32,
            /// Row of the batch.
            request: i32,
            /// Move, branch, step or node within the request; row of the operand; -1 where none applies.
            step: i32,
            /// The index that was computed; of a probe the column of the first offending value.
            index: i64,
            /// One past the largest allowed index; 0 for a probe.
            bound: i64,
            /// Finding of a probe of scores (`Probe`); 0 for an access.
            probe: i32,
            /// Absolute position of the token that could not be drawn; -1 where none applies.
            position: i32,
        }
    }
}
