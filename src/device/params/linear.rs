//! `linear`: a product of a few rows with a weight.

declare! {
    constants {
        /// Most rows of a launch of `cuda/linear.cu`.
        LINEAR_ROWS = 16,
    }
    structs {
        /// Parameters of `cuda/linear.cu`, passed by value behind the maps of weight and rows.
        LinearParams {
            /// `[rows, outputs]`, of the weight's type or of float32.
            y: u64,
            /// Outputs: rows of the weight; a multiple of 8.
            outputs: i32,
            /// Rows, at most `LINEAR_ROWS`.
            rows: i32,
            /// Stages that each part of the inputs goes through.
            stages: i32,
            /// Inputs of a part.
            part: i32,
            /// 1 where y is of float32.
            f32_output: u32,
            /// Keeps the size a multiple of 8.
            reserved: u32,
        }
    }
}
