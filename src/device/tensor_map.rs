//! Tensor maps: how the copy engine of compute capability 9.0 reads a matrix, box by box.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::driver::named;
use crate::error::Result;

/// Columns of a box: rows of 128 bytes, whose 16-byte pieces are exchanged by the row's index modulo 8.
pub(super) const BOX_COLUMNS: u32 = 64;

/// Map of a matrix of elements of 16 bits, for a kernel's parameters.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(super) struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// The map of `[rows, columns]`, row-major without gaps, at `address`, in boxes of `box_rows` rows. What lies outside the
    /// matrix is zeros in a box. `columns` is a multiple of 8, the address one of 16, and a box has up to 256 rows; else the
    /// driver refuses it. Reads nothing at the address.
    pub(super) fn of_16_bits(address: u64, [rows, columns]: [u32; 2], box_rows: u32) -> Result<Self> {
        use sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 as BFLOAT16;
        use sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE as ZEROS;
        use sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE as PLAIN;
        use sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B as PROMOTION;
        use sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B as SWIZZLE;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (sizes, strides) = ([u64::from(columns), u64::from(rows)], [u64::from(columns) * 2]);
        let (boxes, steps) = ([BOX_COLUMNS, box_rows], [1, 1]);
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
                SWIZZLE,
                PROMOTION,
                ZEROS,
            )
            .result()
        })?;
        Ok(Self(map))
    }
}
