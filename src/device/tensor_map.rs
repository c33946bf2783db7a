//! Tensor maps: how the copy engine of compute capability 9.0 reads a matrix, box by box.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::driver::named;
use crate::error::Result;

/// Columns of a box whose rows are 128 bytes.
pub(super) const BOX_COLUMNS: u32 = 64;

/// Map of a matrix of elements of 16 bits, for a kernel's parameters.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(super) struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// The map of `[rows, columns]`, row-major without gaps, at `address`, in boxes of `[box_rows, box_columns]`. What lies
    /// outside the matrix is zeros in a box. The 16-byte pieces of a box's rows are exchanged, so that eight rows at one piece
    /// lie in different banks: in rows of [`BOX_COLUMNS`] by the row's index modulo 8, of 16 by a quarter of that.
    /// `columns` is a multiple of 8, the address one of 16, and a box has 8, 16 or [`BOX_COLUMNS`] columns and up to 256 rows; else the
    /// driver refuses it. Reads nothing at the address.
    pub(super) fn of_16_bits(
        address: u64,
        [rows, columns]: [u32; 2],
        [box_rows, box_columns]: [u32; 2],
    ) -> Result<Self> {
        use sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 as BFLOAT16;
        use sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE as ZEROS;
        use sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE as PLAIN;
        use sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B as PROMOTION;
        use sys::CUtensorMapSwizzle as Swizzle;
        let swizzle = match box_columns {
            BOX_COLUMNS => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            16 => Swizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            _ => Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        };
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (sizes, strides) = ([u64::from(columns), u64::from(rows)], [u64::from(columns) * 2]);
        let (boxes, steps) = ([box_columns, box_rows], [1, 1]);
        // SAFETY: every pointer is to as many numbers as a matrix has dimensions, strides to one less.
        named("cuTensorMapEncodeTiled", unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                BFLOAT16,
                2,
                address as *mut c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                PLAIN,
                swizzle,
                PROMOTION,
                ZEROS,
            )
            .result()
        })?;
        Ok(Self(map))
    }
}
