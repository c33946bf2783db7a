//! The kernels of `rows`: gathers, norms and activations of rows.

use super::faults::Report;

declare! {
    ids {
        Kernel {
            KERNEL_EMBED = 16: "embed",
            KERNEL_GATHER_ROWS = 17: "gather_rows",
            KERNEL_RMS_NORM = 18: "add_rms_norm",
            KERNEL_GATED_UP = 19: "gated_up",
            KERNEL_ROW_CONV = 29: "row_conv",
            KERNEL_COPY_ROWS = 41: "copy_rows",
        }
        Buffer {
            BUFFER_EMBEDDING = 33: "embedding table",
            BUFFER_ROWS = 34: "rows",
            BUFFER_ROWS_OUT = 82: "rows (destination)",
        }
    }
    structs {
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
            /// Destination of faults.
            report: Report,
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
            /// Destination of faults.
            report: Report,
            /// Stride of `residual`.
            residual_stride: u64,
            /// Stride of `x`.
            x_stride: u64,
            /// Stride of `out`.
            out_stride: u64,
            /// Stride of `copy`.
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
            /// Destination of faults.
            report: Report,
            /// Stride of `gate_up`.
            in_stride: u64,
            /// Stride of `out`.
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

        /// Parameters of `row_conv` in `cuda/rows.cu`, passed by value. Strides are elements from row to row.
        RowConvParams {
            /// `[rows, columns]`.
            x: u64,
            /// `[taps, columns]`: what the factors of all rows have in common.
            base: u64,
            /// `[rows, taps * groups]`: what is added to a row's factors, for each group of columns.
            own: u64,
            /// `int32[requests + 1]`: first row of each request, and the end of the last one's.
            starts: u64,
            /// `[rows, columns]`: written.
            out: u64,
            /// Stride of `x`.
            x_stride: u64,
            /// Stride of `base`.
            base_stride: u64,
            /// Stride of `own`.
            own_stride: u64,
            /// Stride of `out`.
            out_stride: u64,
            /// Requests.
            requests: i32,
            /// Elements of a row.
            columns: i32,
            /// Rows that each is made of, its own included.
            taps: i32,
            /// Groups of columns.
            groups: i32,
            /// 1 to add to `out`.
            adds: u32,
            /// Makes the size a multiple of 8.
            reserved: u32,
        }
    }
}
