//! The kernels of `fingerprint`: reproducible operands, and fingerprints of rows.

declare! {
    ids {
        Mirror {
            MIRROR_NONE = 0: "rows as they come",
            MIRROR_EQUAL = 1: "rows that read the same from both ends",
            MIRROR_NEGATED = 2: "rows whose second half is the first from its end, negated",
        }
    }
    structs {
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
            /// Mirror id (`Mirror`).
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
