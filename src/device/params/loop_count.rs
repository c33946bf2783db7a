//! `loop_count`: the condition of a graph's loop.

declare! {
    structs {
        /// Parameters of `cuda/loop_count.cu`, passed by value; one thread.
        LoopCountParams {
            /// `int32[1]`: iterations left, this one included.
            left: u64,
            /// `int32[1]`: anything but 0 ends the loop; null for none.
            stop: u64,
            /// The loop's condition.
            handle: u64,
        }
    }
}
